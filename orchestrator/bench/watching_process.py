"""The process that measures what watching costs: `python -m orchestrator.bench.watching_process`. Figures as JSON."""

import sys

import msgspec

from orchestrator.bench.watching import figures


def main() -> int:
    sys.stdout.write(msgspec.json.encode(list(figures())).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
