"""EAGLE-3 drafters of both published families, with EAGLE-3.1's variants. Knows no messages."""

import time
from pathlib import Path

from draft_worker.conditioned.engine import ConditionedEngine
from draft_worker.conditioned.runner import LoadedDrafter, MlxRunner
from draft_worker.drafters.eagle3_checkpoint import borrow_ends, read_eagle3
from draft_worker.short_head import ShortHead
from protocol.contracts.engines import EngineDeclaration
from protocol.contracts.tokenizer_fingerprint import vocabulary_fingerprint
from protocol.inference.device import BESIDE_TARGET, wire
from protocol.messages.features import FeatureForm
from protocol.worker.process import WorkerSetup

ENGINE = EngineDeclaration(help="an EAGLE-3 drafter, which reads the target's hidden states", model="drafter")


def load(setup: WorkerSetup) -> ConditionedEngine:
    """Raises InputError if the folder holds no EAGLE-3 drafter, or one of another target."""
    began = time.perf_counter()
    folder, target = Path(setup.model), Path(setup.target) if setup.target else None
    tokens = folder if target is None else target
    runner = MlxRunner(loaded(folder, target), folder)
    engine = ConditionedEngine("eagle3", folder, runner, vocabulary_fingerprint(tokens), tokens)
    wire(setup.gpu_share, BESIDE_TARGET)
    if setup.pace is None:
        engine.measure(time.perf_counter() - began)
    return engine


def loaded(folder: Path, target: Path | None) -> LoadedDrafter:
    """`target`: the folder of the target, whose embedding and head serve where the drafter has none.

    Raises InputError if a folder is damaged, or the two don't fit.
    """
    network = read_eagle3(folder, target)
    form, ends = network.form, borrow_ends(network, folder, target)
    return LoadedDrafter(
        network,
        FeatureForm(form.outputs, form.target_width),
        form.hidden_size,
        form.vocabulary,
        form.context,
        "eagle3",
        ends.head if ends is not None and isinstance(ends.head, ShortHead) else None,
    )
