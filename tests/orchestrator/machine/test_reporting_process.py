"""A process that reports: what its parent is told when it ends early."""

import sys
from pathlib import Path

import pytest

from orchestrator.lab.bench.forwards import ComparisonOrder, ComparisonReport, Sampled
from orchestrator.machine import reporting_process
from orchestrator.machine.reporting_process import reports
from protocol.errors import PipelineError

ORDER = ComparisonOrder()


@pytest.mark.parametrize("line", ['{"type":"progr', "", "nonsense"])
def test_a_process_killed_in_the_middle_of_a_report_is_told_in_a_sentence(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    script = f"import sys; sys.stdout.write({line!r}); sys.stderr.write('out of memory')"
    monkeypatch.setattr(reporting_process, "module_command", lambda _: [sys.executable, "-c", script])

    with pytest.raises(PipelineError, match=r"The job ended unexpectedly; start it again.*out of memory"):
        list(reports("any", ORDER, ComparisonReport, (Sampled,), name="The job", grace=5.0))
