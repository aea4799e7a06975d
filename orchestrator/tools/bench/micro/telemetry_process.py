"""The process that measures what telemetry costs: figures as JSON on standard output."""

import sys

import msgspec

from orchestrator.tools.bench.micro.telemetry import figures


def main() -> int:
    sys.stdout.write(msgspec.json.encode(list(figures())).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
