"""The promises about faults, with small counts; `bin/test -m slow` runs the full counts.

Only the full runs check time limits: a busy machine may break them.
"""

import os
import sys
from pathlib import Path
from typing import get_args

import pytest

from orchestrator.lab.drill.drills import commands
from orchestrator.lab.drill.outcome import DrillName, DrillOutcome
from orchestrator.lab.drill.processes import Sample, Usage, figures, growth, levels
from orchestrator.lab.drill.registry import DRILLS

FEW: dict[DrillName, int] = {
    "draft-kill": 1,
    "draft-stop": 1,
    "target-kill": 1,
    "orchestrator-kill": 1,
    "interrupt": 1,
    "segments": 4,
}
"""tests/end_to_end/test_chaos.py covers garbage. A short soak shows nothing."""


def test_every_name_has_a_drill():
    assert get_args(DrillName) == tuple(DRILLS)


@pytest.mark.parametrize("name", ["orchestrator-kill", "interrupt"])
def test_commands_draft_in_mlx_since_the_automatic_engine_works_in_the_background(
    name: DrillName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    told = tmp_path / "told"
    program = "import sys; open(sys.argv[1], 'a').write(' '.join(sys.argv[2:]) + '\\n')"
    monkeypatch.setattr(commands, "_program", lambda: [sys.executable, "-S", "-c", program, str(told)])

    DRILLS[name].run(0, 7, lambda: None)

    (line,) = told.read_text().splitlines()
    assert line.startswith("generate ")
    assert "--draft-engine mlx" in line


@pytest.mark.thorough
@pytest.mark.parametrize("name", FEW)
def test_tokens_are_right_and_nothing_is_left_behind(name: DrillName):
    outcome = DRILLS[name].run(FEW[name], 7, lambda: None)

    assert list(outcome.failures) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", DRILLS)
def test_the_promise_is_kept_to_the_full(name: DrillName):
    outcome = DRILLS[name].run(DRILLS[name].full, 7, lambda: None)

    assert outcome.held, broken(outcome)


def broken(outcome: DrillOutcome) -> str:
    """What broke the promise, and the load of the machine."""
    sentences = [*outcome.failures, *outcome.late][:20]
    return "\n".join([outcome.measured, f"load {os.getloadavg()[0]:.1f}", *sentences])


# What processes hold ------------------------------------------------------------------------------


MIB = 1 << 20


def samples(memories: list[int], descriptors: int = 9, later: int = 9) -> list[Sample]:
    half = len(memories) // 2
    return [
        {"worker": Usage(memory * MIB, later if number > half else descriptors, 3)}
        for number, memory in enumerate(memories)
    ]


def test_the_warm_up_may_grow():
    assert growth(["worker"], samples([10, 90, *[100] * 6])) == []


def test_memory_that_goes_on_growing_is_told():
    assert growth(["worker"], samples([100, 100, 200, 200, 300, 300, 400, 400])) == [
        "The memory of worker grew from 200 to 400 MiB."
    ]


def test_one_more_descriptor_is_a_request_and_two_are_a_leak():
    assert growth(["worker"], samples([100] * 8, later=10)) == []
    assert growth(["worker"], samples([100] * 8, later=11)) == ["The descriptors of worker grew from 9 to 11."]


def test_a_process_that_was_never_there_has_neither_growth_nor_figures():
    assert growth(["other"], samples([100] * 8)) == []
    assert figures(["other"], samples([100] * 8)) == {}


def test_levels_are_those_of_the_second_and_the_last_quarter():
    assert levels("worker", samples([1, 1, 20, 20, 30, 30, 40, 40])) == (
        "worker MiB / descriptors / threads 20 / 9 / 3 → 40 / 9 / 3"
    )
