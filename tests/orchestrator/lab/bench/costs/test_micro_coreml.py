"""Laws of the host's work beside a call: no allocation grows with the context, and figures above a limit are marked."""

import pytest

from orchestrator.lab.bench.costs.micro import findings, measured
from orchestrator.lab.bench.costs.micro_coreml import calls, choices, peak
from orchestrator.lab.bench.costs.micro_machine import telemetry
from orchestrator.lab.findings import Value
from protocol.errors import PipelineError
from tests.support.shown import shown


def test_no_allocation_of_a_call_grows_with_the_context():
    least, most = peak(512), peak(8192)

    assert abs(most - least) < 512


def test_every_step_that_has_a_limit_is_measured():
    names = [figure.name for figure in [*choices(repeats=1), *calls(repeats=1)] if figure.limit is not None]

    assert sum("choose" in name for name in names) == 6
    assert sum("inputs of a call" in name for name in names) == 9


def test_a_figure_above_its_limit_is_marked():
    over, under = (Value(name, value, "ms", limit=0.2) for name, value in (("slow", 0.3), ("quick", 0.1)))
    found = findings([over, under], [])
    marked = [line for line in shown(found, colours=True).splitlines() if "\x1b[31m" in line]

    assert not over.within_limit
    assert under.within_limit
    assert len(marked) == 1
    assert "slow" in marked[0]
    assert found.figures["figures"][0]["limit"] == 0.2


def test_a_process_that_fails_is_reported_in_a_sentence():
    with pytest.raises(PipelineError, match=r"draft_worker.no_such_program failed; its last line: .*No module named"):
        measured([["draft_worker.no_such_program"]])


def test_the_cost_of_telemetry_is_measured():
    machine, recording, frame, size = telemetry(tokens=40, repeats=1)

    assert machine.unit == recording.unit == "us"
    assert machine.value > 0.0
    assert recording.value > 0.0
    assert frame.limit is not None
    assert 0.1 < size.value < 64.0
