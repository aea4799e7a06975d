"""EAGLE-3 drafters of both published families, with EAGLE-3.1's variants. Knows no messages."""

from pathlib import Path

from draft_worker.conditioned.engine import ConditionedEngine
from draft_worker.conditioned.runner import ConditionedRunner
from draft_worker.drafters.eagle3 import borrow_ends, read_eagle3
from draft_worker.short_head import ShortHead
from protocol.contracts.engines import EngineDeclaration
from protocol.messages.features import FeatureForm
from protocol.worker.process import WorkerSetup

ENGINE = EngineDeclaration(help="an EAGLE-3 drafter, which reads the target's hidden states", model="drafter")


def load(setup: WorkerSetup) -> ConditionedEngine:
    """Raises InputError if the folder holds no EAGLE-3 drafter, or one of another target."""
    return ConditionedEngine.load(setup, loaded)


def loaded(folder: Path, target: Path | None) -> ConditionedRunner:
    """`target`: the folder of the target, whose embedding and head serve where the drafter has none.

    Raises InputError if a folder is damaged, or the two don't fit.
    """
    network = read_eagle3(folder, target)
    form, ends = network.form, borrow_ends(network, folder, target)
    return ConditionedRunner(
        network,
        folder,
        features=FeatureForm(form.outputs, form.output_width),
        width=form.width,
        vocabulary=form.vocabulary,
        context=form.positions,
        architecture="eagle3",
        short_head=ends.head if ends is not None and isinstance(ends.head, ShortHead) else None,
    )
