"""The process that measures adoption: `python -m orchestrator.tools.bench.micro.adoption_process`. Figures as JSON."""

import sys

import msgspec

from orchestrator.tools.bench.micro.adoption import measure
from protocol.contracts.figure import Figure


def main() -> int:
    figures = []
    for each in measure():
        parts = {"attach": each.attach, "validate": each.validate, "copy": each.copy, "in all": each.seconds}
        name = f"adopt {each.tokens:,} tokens of Qwen2.5-3B's KV"
        figures += [Figure(f"{name}, {part}", seconds * 1e3, "ms") for part, seconds in parts.items()]
        figures.append(Figure(f"{name}, share of a plain copy's speed", each.bandwidth_share, ""))
    sys.stdout.write(msgspec.json.encode(figures).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
