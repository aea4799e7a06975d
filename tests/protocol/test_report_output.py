"""Programs that report on their standard output: nothing that a library writes there is taken for a report."""

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from orchestrator.machine.drafts.auto_draft import AutoDraft
from orchestrator.machine.drafts.preparation import PreparationOrder
from protocol.contracts.coreml import Choices, ConversionOrder, ExaminationOrder, ExaminedSystem
from protocol.contracts.training import TrainingChoices, TrainingOrder
from tests.support.models.coreml_programs import converted_demo
from tests.support.models.drafter_files import safeailab, write
from tests.support.paths import DEMO_DRAFT, DEMO_TARGET

BABBLING = """
import importlib, os, sys

def hear(event, args):
    # As Core ML's compiler and other native code would, at any moment.
    if event == "open" and str(args[0]).startswith({folders!r}):
        os.write(1, b"compiling ...\\n")

program = importlib.import_module({module!r})
sys.addaudithook(hear)
sys.exit(program.main())
"""


def arguments(module: str, folder: Path) -> list[str]:
    if module == "draft_worker.drafter_examination":
        return ["eagle3", str(write(folder, safeailab())), str(DEMO_TARGET)]
    orders = {
        "draft_worker.coreml.examine": lambda: ExaminationOrder(
            folder=str(converted_demo()), stage="golden", golden=str(folder / "golden.npz")
        ),
        "draft_worker.coreml.conversion.__main__": lambda: ConversionOrder(
            source=str(DEMO_DRAFT), destination=str(folder / "converted"), choices=Choices()
        ),
        # No system like this one: it ends before it examines.
        "orchestrator.machine.drafts.preparation": lambda: PreparationOrder(
            auto=AutoDraft(
                checkpoint=str(DEMO_DRAFT), target=str(DEMO_TARGET), place=ExaminedSystem("system", "chip", "package")
            ),
            needed=1 << 60,
        ),
        "draft_worker.training.__main__": lambda: TrainingOrder(
            target=str(DEMO_TARGET),
            out=str(folder / "out"),
            work=str(folder / "work"),
            prompts="",
            choices=TrainingChoices(),
        ),
    }
    return [msgspec.json.encode(orders[module]()).decode() if module in orders else str(DEMO_TARGET)]


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(
    "module",
    [
        "target_worker.model_examination",
        "draft_worker.drafter_examination",
        "draft_worker.coreml.examine",
        "draft_worker.coreml.conversion.__main__",
        "orchestrator.machine.drafts.preparation",
        "draft_worker.training.__main__",
    ],
)
def test_what_a_library_writes_to_descriptor_1_is_no_report(module: str, tmp_path: Path):
    folders = (str(DEMO_TARGET), str(DEMO_DRAFT), str(converted_demo()), str(tmp_path))
    program = BABBLING.format(module=module, folders=folders)
    done = subprocess.run([sys.executable, "-c", program, *arguments(module, tmp_path)], capture_output=True, text=True)
    reports = [json.loads(line) for line in done.stdout.splitlines()]

    assert reports
    assert "compiling ..." in done.stderr.splitlines()
