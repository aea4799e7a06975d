"""Tiny trained drafters, as their own engines run them and as Core ML packages, beside one target."""

from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from draft_worker.coreml.conversion.trained import convert_drafter
from draft_worker.coreml.converted import Converted
from draft_worker.drafters.eagle3 import Eagle3, write_eagle3
from draft_worker.engine import Engine
from draft_worker.engines import block, eagle3
from protocol.contracts.coreml.conversion import Choices
from protocol.contracts.drafters.description import Eagle3Form
from protocol.contracts.drafters.detection import read_drafter
from protocol.worker.process import WorkerSetup
from tests.support.models.tiny_models import VOCABULARY
from tests.support.models.trained_drafters import SHORT_HEAD, WIDTH, loud, shorten, write_block_folder, write_target

TARGET_LAYERS = 4
EAGLE3_KINDS: dict[str, dict[str, Any]] = {
    "reduced head": {"head_size": len(SHORT_HEAD)},
    "normed": {"norm_before_fc": True, "norm_before_residual": True, "norm_output": True},
    "each output normed": {"fc_norm": True, "norm_heads": True, "biases": ("fc",)},
    "a scaled rope": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "the target's ends": {"own_embedding": False, "own_head": False},
}
BLOCK_KINDS = (
    *("z-lab", "z-lab with windows", "z-lab with wide windows", "z-lab, causal"),
    *("vanilla", "gated", "rnn", "long prefix", "short head"),
    *("DFlash2", "DFlash2, scaled", "DFlash2, long prefix", "DFlash2, short head"),
)
KINDS = (*EAGLE3_KINDS, *BLOCK_KINDS)
_CHOICES = Choices(widths=(1, 4, 16), context=96)
_FORM = Eagle3Form(
    outputs=(0, 1, 3),
    width=WIDTH,
    inner=48,
    heads=4,
    kv_heads=2,
    head_width=8,
    vocabulary=VOCABULARY,
    head_size=VOCABULARY,
    output_width=WIDTH,
    own_embedding=True,
    positions=256,
)


class DrafterPackage(NamedTuple):
    drafter: Path
    target: Path
    converted: Converted

    def own_engine(self) -> Engine:
        """The engine of the drafter itself, in MLX."""
        module = block if self.converted.package.conditioning.block is not None else eagle3  # type: ignore[union-attr]
        return module.load(setup(module.__name__.split(".")[-1], self.drafter, self.target))


def write_drafter(kind: str, folder: Path, target: Any, **changes: Any) -> Path:
    """One of KINDS for a target of `write_target`."""
    if kind in EAGLE3_KINDS:
        options = EAGLE3_KINDS[kind] | changes
        form = Eagle3Form(**{name: getattr(_FORM, name) for name in _FORM.__struct_fields__} | options)
        mx.random.seed(3)
        head = SHORT_HEAD if form.head_size < VOCABULARY else None
        write_eagle3(folder, loud(Eagle3(form, head)), mx.float32)
    else:
        base, _, variant = kind.rpartition(", ")
        name = base or "vanilla"
        if variant == "long prefix":
            changes |= {"clean_prefix": 3}
        elif kind == "z-lab with wide windows":
            # The package's context fits in them.
            name, changes = "z-lab with windows", changes | {"windows": (None, 200)}
        elif variant == "scaled":
            # Its bounded logits are so near one another that rounding would decide which of them are the best.
            name, changes = kind, changes | {"choices": VOCABULARY}
        elif variant != "short head":
            name = kind
        write_block_folder(folder, name, target, target_layers=TARGET_LAYERS, **changes)
        if variant == "short head":
            shorten(folder)
    return folder


def write_package(kind: str, root: Path, choices: Choices = _CHOICES) -> DrafterPackage:
    """A drafter, its target and its package, in new folders under `root`."""
    target = write_target(root / "target", num_hidden_layers=TARGET_LAYERS)
    drafter = write_drafter(kind, root / "drafter", target)
    return converted(drafter, root / "target", root / "package", choices)


def converted(drafter: Path, target: Path, package: Path, choices: Choices = _CHOICES) -> DrafterPackage:
    found = read_drafter(drafter)
    assert found is not None
    convert_drafter(found, drafter, target, package, choices)
    return DrafterPackage(drafter, target, Converted.open(package))


def setup(engine: str, model: Path, target: Path) -> WorkerSetup:
    return WorkerSetup(
        address="", epoch=1, incarnation=1, engine=engine, model=str(model), target=str(target), pace=None
    )
