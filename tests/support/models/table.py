"""The table of architectures in docs/use/models.md: `python -m tests.support.models.table` writes it."""

from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from draft_worker.coreml.conversion.architectures import ARCHITECTURES
from protocol.inference.language_model import LanguageModel
from tests.support.models.architectures import IMPOSSIBLE, modules, tiny
from tests.support.paths import ROOT

DOCUMENT = ROOT / "docs" / "use" / "models.md"
BEGIN, END = "<!-- table of architectures -->", "<!-- end of the table -->"
_COLUMNS = ("level", "requests", "reuse of a prefix", "restart", "divided", "Core ML draft", "architectures")
_HEAD = f"| {' | '.join(_COLUMNS)} |\n|{'---|' * len(_COLUMNS)}"


class Row(NamedTuple):
    """What can be had of an architecture, in the words of the table."""

    level: str
    requests: str
    reuse: str
    restart: str
    divided: str
    core_ml: str


def row(name: str) -> Row:
    """Of a tiny model."""
    network = tiny(name)
    made = LanguageModel(network, Path(name))
    sequence = made.sequence()
    sequence.prefill(range(8))
    sequence.prefill(range(8))
    inner = getattr(network, "language_model", network)
    return Row(
        made.level,
        "one forward" if made.joins else "in turns",
        "any token" if sequence.reach(3) == 3 else "remembered states",
        "adopts" if made.layout is not None else "prefills",
        "yes" if hasattr(network, "shard") or hasattr(inner, "shard") else "no",
        "yes" if any(isinstance(inner, each.network) for each in ARCHITECTURES) else "no",
    )


def table() -> str:
    """Markdown, one line for each distinct row."""
    names: defaultdict[Row, list[str]] = defaultdict(list)
    for name in sorted(set(modules()) - set(IMPOSSIBLE)):
        names[row(name)].append(name)
    order = {level: number for number, level in enumerate(("tree", "chain", "plain"))}
    rows = sorted(names, key=lambda row: (order[row.level], -len(names[row]), row))
    return "\n".join([_HEAD, *(f"| {' | '.join(row)} | {', '.join(names[row])} |" for row in rows)])


def written(document: str) -> str:
    """`document` with the table of now."""
    before, _, rest = document.partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    DOCUMENT.write_text(written(DOCUMENT.read_text()))
