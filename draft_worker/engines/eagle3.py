"""EAGLE-3 drafters of both published families, with EAGLE-3.1's variants. Knows no messages."""

import json
import time
from pathlib import Path
from typing import NamedTuple

from draft_worker.conditioned.engine import ConditionedEngine
from draft_worker.conditioned.runner import LoadedDrafter, MlxRunner
from draft_worker.drafters.eagle3 import Eagle3
from draft_worker.drafters.eagle3_checkpoint import read_eagle3
from draft_worker.drafters.token_ends import TokenEnds, drafter_ends
from draft_worker.short_head import ShortHead
from protocol.contracts.engines import EngineDeclaration
from protocol.contracts.tokenizer_fingerprint import vocabulary_fingerprint
from protocol.errors import InputError
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
    sizes = TargetSizes(0, 0) if target is None else target_sizes(target)
    network = read_eagle3(folder, sizes.layers or None)
    form = network.form
    if sizes.width not in (0, form.target_width) or (sizes.layers and form.outputs[-1] >= sizes.layers):
        raise InputError(
            f"The draft in {folder} reads states of {form.target_width:,} numbers behind the layers {form.outputs}, "
            f"but {target} has {sizes.layers} layers of {sizes.width:,}: choose the draft's own target."
        )
    ends = None if form.own_embedding and form.own_head else _borrowed(network, folder, target)
    return LoadedDrafter(
        network,
        FeatureForm(form.outputs, form.target_width),
        form.hidden_size,
        form.vocabulary,
        form.context,
        "eagle3",
        ends.head if ends is not None and isinstance(ends.head, ShortHead) else None,
    )


def _borrowed(network: Eagle3, folder: Path, target: Path | None) -> TokenEnds:
    """Embedding and head of the target, which the network uses from now on."""
    form, tokens = network.form, None if network.form.own_head else network.head_tokens
    width, vocabulary = form.hidden_size, form.vocabulary
    ends = drafter_ends(folder, None, target, width, vocabulary, head=not form.own_head, head_tokens=tokens)
    network.borrow(ends.embed, ends.head)
    return ends


class TargetSizes(NamedTuple):
    """0: not stated."""

    layers: int
    width: int


def target_sizes(folder: Path) -> TargetSizes:
    """Raises InputError if the file can't be read."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
        text = config.get("text_config") or config
        return TargetSizes(*(int(text.get(name) or 0) for name in ("num_hidden_layers", "hidden_size")))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise InputError(
            f"The config.json of the target in {folder} can't be read ({error}): download the target again."
        ) from error
