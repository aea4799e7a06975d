"""`python -m target_worker.forward_comparison ORDER`: one JSON report a line."""

import os
import sys
import time

import msgspec

from protocol.contracts.forward_comparison import ComparisonOrder
from target_worker.forward_comparison.timing import compare


def main() -> int:
    order = msgspec.json.decode(sys.argv[-1], type=ComparisonOrder)
    # Libraries may print to standard output, which is for reports alone.
    output = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for kind in order.kinds:
        for report in compare(kind, order, time.perf_counter):
            output.write(msgspec.json.encode(report) + b"\n")
            output.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
