"""Heads for multi-token prediction of the target's own checkpoint. Knows no messages."""

import time
from pathlib import Path

from draft_worker.conditioned.engine import ConditionedEngine
from draft_worker.conditioned.runner import LoadedDrafter, MlxRunner
from draft_worker.drafters.mtp import read_mtp
from draft_worker.drafters.token_ends import drafter_ends
from protocol.contracts.engines import EngineDeclaration
from protocol.contracts.tokenizer_fingerprint import vocabulary_fingerprint
from protocol.inference.device import BESIDE_TARGET, wire
from protocol.inference.language_model import stated_context
from protocol.messages.features import FINAL, FeatureForm
from protocol.worker.process import WorkerSetup

ENGINE = EngineDeclaration(help="the target's own head for multi-token prediction", model="drafter")


def load(setup: WorkerSetup) -> ConditionedEngine:
    """Raises InputError if the folder holds no such head, or one of another target."""
    began = time.perf_counter()
    folder, target = Path(setup.model), Path(setup.target or setup.model)
    engine = ConditionedEngine(
        "mtp", folder, MlxRunner(loaded(folder, target), folder), vocabulary_fingerprint(target), target
    )
    wire(setup.gpu_share, BESIDE_TARGET)
    if setup.pace is None:
        engine.measure(time.perf_counter() - began)
    return engine


def loaded(folder: Path, target: Path) -> LoadedDrafter:
    """`target`: the folder of the target, whose embedding and head the head shares; it may be the same folder.

    Raises InputError if a folder is damaged, or the two don't fit.
    """
    network, config = read_mtp(folder)
    width, vocabulary = config["hidden_size"], config["vocab_size"]
    ends = drafter_ends(folder, None, target, width, vocabulary)
    network.borrow(ends.embed, ends.head)
    return LoadedDrafter(network, FeatureForm((FINAL,), width), width, vocabulary, stated_context(config), "mtp")
