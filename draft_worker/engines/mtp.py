"""Heads for multi-token prediction of the target's own checkpoint. Knows no messages."""

from pathlib import Path

from draft_worker.conditioned.engine import ConditionedEngine
from draft_worker.conditioned.runner import ConditionedRunner
from draft_worker.drafters.mtp import read_mtp
from draft_worker.drafters.token_ends import drafter_ends
from protocol.contracts.engines import EngineDeclaration
from protocol.inference.language_model import stated_context
from protocol.messages.features import FINAL, FeatureForm
from protocol.worker.process import WorkerSetup

ENGINE = EngineDeclaration(help="the target's own head for multi-token prediction", model="drafter")


def load(setup: WorkerSetup) -> ConditionedEngine:
    """Raises InputError if the folder holds no such head, or one of another target."""
    return ConditionedEngine.load(setup, _loaded)


def _loaded(folder: Path, target: Path | None) -> ConditionedRunner:
    """`target`: the folder of the target, whose embedding and head the head shares; None: the same folder."""
    network, config = read_mtp(folder)
    width, vocabulary = config["hidden_size"], config["vocab_size"]
    ends = drafter_ends(folder, None, target or folder, width, vocabulary, network.norm.weight.dtype)
    network.borrow(ends.embed, ends.head)
    return ConditionedRunner(
        network,
        folder,
        features=FeatureForm((FINAL,), width),
        width=width,
        vocabulary=vocabulary,
        context=stated_context(config),
        architecture="mtp",
    )
