"""`python -m orchestrator.lab.bench.forward_comparison ORDER`: one JSON report a line."""

import os
import sys
import time

import mlx.core as mx
import msgspec

from orchestrator.lab.bench.forward_comparison.messages import ComparisonOrder
from orchestrator.lab.bench.forward_comparison.timing import compare


def main() -> int:
    order = msgspec.json.decode(sys.argv[-1], type=ComparisonOrder)
    # Libraries may print to standard output, which is for reports alone.
    output = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # On a processor only this process's own time counts: other programs may be at work too.
    clock = time.process_time if mx.default_device() == mx.Device(mx.cpu) else time.perf_counter
    for kind in order.kinds:
        for report in compare(kind, order, clock):
            output.write(msgspec.json.encode(report) + b"\n")
            output.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
