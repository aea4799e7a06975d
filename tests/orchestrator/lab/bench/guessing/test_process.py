"""The process that examines drafts: what it can't read becomes a sentence for its parent."""

from pathlib import Path

import pytest

from orchestrator.lab.bench.acceptance import AcceptanceFinished, AcceptanceOrder, AcceptanceReport
from orchestrator.machine.reporting_process import reports
from protocol.errors import InputError, PipelineError
from tests.support.paths import DEMO_TARGET


def _run(target: Path, texts: Path) -> None:
    order = AcceptanceOrder(target=str(target), texts=str(texts), drafts=())
    found = reports(
        "orchestrator.lab.bench.guessing",
        order,
        AcceptanceReport,
        (AcceptanceFinished,),
        name="The examination",
        grace=5.0,
    )
    list(found)


def test_a_target_that_can_not_be_loaded_gets_a_sentence(tmp_path: Path):
    with pytest.raises(InputError, match="can't be loaded as a target"):
        _run(tmp_path, tmp_path / "texts.json")


@pytest.mark.thorough
def test_texts_that_can_not_be_read_get_a_sentence(tmp_path: Path):
    with pytest.raises(PipelineError, match=r"could not be examined \(.*texts\.json"):
        _run(DEMO_TARGET, tmp_path / "texts.json")
