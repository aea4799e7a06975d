"""What a trained drafter is and reads of a target, and whether the two fit. Pure."""

from collections.abc import Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import Literal, TypeAlias

import msgspec

from protocol.contracts.model_folder import TargetShape

DrafterKind: TypeAlias = Literal["eagle3", "peagle", "mtp", "dspark", "dflash", "dflash2", "exit"]

NAMES: Mapping[DrafterKind, str] = MappingProxyType(
    {
        "eagle3": "an EAGLE-3 drafter",
        "peagle": "a P-EAGLE drafter",
        "mtp": "an MTP head",
        "dspark": "a DSpark drafter",
        "dflash": "a DFlash drafter",
        "dflash2": "a DFlash2 drafter",
        "exit": "an early exit",
    }
)
ENGINES: Mapping[DrafterKind, str] = MappingProxyType(
    {
        "eagle3": "eagle3",
        "peagle": "block",
        "mtp": "mtp",
        "dspark": "block",
        "dflash": "block",
        "dflash2": "block",
        "exit": "layerskip",
    }
)
"""The draft engine of each kind."""
CONVERTIBLE: tuple[DrafterKind, ...] = ("eagle3", "dspark", "dflash", "dflash2")
"""Kinds that have a form for Core ML."""
FINAL = -1
"""`protocol.messages.features.FINAL`, which this layer can't import."""
_FEATURE_BYTES = 2
"""Of an element in fp16 or bf16."""


class Drafter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A trained drafter in a folder."""

    kind: DrafterKind
    format: str
    """Whose format its files have."""
    width: int = 0
    """Elements of one output of the target; 0: it reads none."""
    count: int = 0
    """Outputs that it reads."""
    stated_outputs: tuple[int, ...] | None = None
    """Those, counted as `protocol.messages.features` counts them; None: they follow from the target's depth."""
    target_layers: int | None = None
    """Layers of its target; None: not stated."""
    target_vocabulary: int | None = None
    drafted: int | None = None
    """Tokens that it can draft; None: all of the target's."""
    layers: int = 1
    """Its own decoder layers; of an exit, those of the target that it uses."""
    block: int = 1
    """Tokens that one forward guesses behind one another."""
    parameters: int = 0
    """In its files."""
    read: int = 0
    """Parameters that a growth step reads, less those of a head that is the target's."""
    own_head: bool = False
    """Its files have the head that makes logits. Otherwise the target's is used."""

    @property
    def name(self) -> str:
        return NAMES[self.kind]

    @property
    def engine(self) -> str:
        return ENGINES[self.kind]

    @property
    def feature_bytes(self) -> int:
        """Bytes of one token's features, in 16 bits an element."""
        return self.count * self.width * _FEATURE_BYTES

    def outputs(self, target: TargetShape) -> tuple[int, ...]:
        """The outputs of this target that it reads, ascending.

        EAGLE-3 without stated outputs takes those of SafeAILab's code (eagle/model/modeling_llama_kv.py): a low, a
        middle and a high one, which are the inputs of the layers 2, L / 2 and L - 3.
        """
        if self.stated_outputs is not None:
            return self.stated_outputs
        return (1, target.layers // 2 - 1, target.layers - 4)

    def read_beside(self, target: TargetShape) -> int:
        """Parameters that a growth step reads, the target's head included; not the target's layers of an exit."""
        return self.read + (0 if self.own_head else target.width * (self.drafted or target.vocabulary))

    def misfit(self, target: TargetShape) -> str:
        """Why it can't draft for this target, as half a sentence; empty if it can."""
        if self.width and self.width != target.width:
            return f"it reads states of {self.width:,} numbers, and the target's have {target.width:,}"
        if self.target_layers is not None and self.target_layers != target.layers:
            return f"its target has {self.target_layers} layers, and this one has {target.layers}"
        if self.target_vocabulary is not None and self.target_vocabulary != target.vocabulary:
            return f"its target knows {self.target_vocabulary:,} tokens, and this one knows {target.vocabulary:,}"
        if self.kind == "exit":
            return _too_deep(self.layers, target.layers)
        return _absent(self.outputs(target), target.layers)


def _too_deep(exit_layers: int, layers: int) -> str:
    if exit_layers < layers:
        return ""
    return f"it leaves behind layer {exit_layers}, and the target has {layers}: choose 1 to {layers - 1}"


def _absent(outputs: tuple[int, ...], layers: int) -> str:
    if any(later <= earlier for earlier, later in pairwise(outputs)):
        return f"the outputs that it reads coincide in a target of {layers} layers"
    if outputs and max(outputs) >= layers:
        return f"it reads the output of layer {max(outputs)}, counted from 0, and the target has {layers} layers"
    return ""
