"""The pictures of the phases in the documents are drawn from the tables: `python -m tests.docs.test_phases`."""

import re
from collections import defaultdict
from collections.abc import Mapping
from enum import Enum
from typing import Any

import pytest

from orchestrator.core.phases import DRAFT_TRANSITIONS, SERVING, TRANSITIONS, WITH_PLACE, DraftPhase
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "inside" / "architecture.md"
GROUPS = {"any": set(DraftPhase), "with_a_place": set(WITH_PLACE), "serving": set(SERVING)}
TABLES: dict[str, Mapping[Any, Enum]] = {"target": TRANSITIONS, "draft": DRAFT_TRANSITIONS}


def drawn(transitions: Mapping[Any, Enum]) -> str:
    """One arrow for each pair of phases, or of a group and a phase."""
    sources: dict[tuple[Enum, Enum], set[Enum]] = defaultdict(set)
    for (phase, trigger), following in transitions.items():
        sources[trigger, following].add(phase)
    arrows: dict[tuple[str, str], list[str]] = defaultdict(list)
    for (trigger, following), starts in sources.items():
        for name, group in GROUPS.items():
            if group <= starts:
                arrows[name, following.name].append(trigger.name.lower().replace("_", " "))
                starts -= group
        for phase in starts - {following}:
            arrows[phase.name, following.name].append(trigger.name.lower().replace("_", " "))
    lines = [
        f"    {start} --> {end}: {', '.join(sorted(triggers))}" for (start, end), triggers in sorted(arrows.items())
    ]
    return "\n".join(["```mermaid", "stateDiagram-v2", *lines, "```"])


def block(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- phases of the {name} -->\n)(.*?)(\n<!-- end -->)", re.DOTALL)


@pytest.mark.parametrize("name", TABLES)
def test_the_page_shows_the_table(name: str):
    found = block(name).search(PAGE.read_text(encoding="utf-8"))

    assert found is not None
    assert found[2] == drawn(TABLES[name])


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    for each, table in TABLES.items():
        picture = drawn(table)
        text = block(each).sub(lambda found, picture=picture: f"{found[1]}{picture}{found[3]}", text)
    PAGE.write_text(text, encoding="utf-8")
