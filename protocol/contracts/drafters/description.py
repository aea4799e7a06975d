"""What a trained drafter is, the sizes of its network, what it reads of a target, and whether the two fit."""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from protocol.contracts.model_folder import ModelFolder, TargetShape
from protocol.errors import InputError

DrafterKind: TypeAlias = Literal["eagle3", "peagle", "mtp", "dspark", "dflash", "dflash2"]


class KindFacts(NamedTuple):
    name: str
    engine: str
    """The draft engine that runs it."""


KINDS: Mapping[DrafterKind, KindFacts] = MappingProxyType(
    {
        "eagle3": KindFacts("an EAGLE-3 drafter", "eagle3"),
        "peagle": KindFacts("a P-EAGLE drafter", "block"),
        "mtp": KindFacts("an MTP head", "mtp"),
        "dspark": KindFacts("a DSpark drafter", "block"),
        "dflash": KindFacts("a DFlash drafter", "block"),
        "dflash2": KindFacts("a DFlash2 drafter", "block"),
    }
)
FINAL = -1
"""`protocol.messages.features.FINAL`, which this layer can't import."""


MarkovKind = Literal["vanilla", "gated", "rnn"]
Causal = Literal["none", "windows", "all"]


class DecoderForm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What networks of decoder layers that read the target's outputs have in common."""

    outputs: tuple[int, ...]
    """Layers of the target whose outputs it reads, counted from 0, ascending. Empty: they follow from its depth."""
    output_width: int
    """Elements of one output of the target."""
    width: int
    """Elements of the drafter's states."""
    layers: int = 1
    heads: int
    kv_heads: int
    head_width: int
    inner: int
    """Elements between the two halves of the feed-forward part."""
    vocabulary: int
    """Tokens of the target."""
    norm_epsilon: float = 1e-6
    rope_base: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    positions: int = 131072
    """The most positions."""


class BlockForm(DecoderForm, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A drafter whose forward guesses a block of tokens behind an anchor.

    The input of a block is the anchor (the last known token) and then mask tokens, at consecutive positions. DFlash
    guesses a mask's own token at its row. DSpark guesses at each row the token behind it, so that the anchor's row
    counts too (`anchor_predicts`).
    """

    target_layers: int | None = None
    """Layers of the target; None: not stated."""
    block: int
    """Inputs of a block: the anchor and its masks."""
    mask_token: int
    anchor_predicts: bool
    clean_prefix: int = 1
    """Most known tokens at the head of a block, the anchor included, that the drafter was trained for."""
    markov: MarkovKind | None = None
    """How the token before corrects the guess of a row; None: a row's guess is a marginal."""
    rank: int = 0
    """Elements of a token's vector in the Markov head or in the selector."""
    choices: int = 0
    """Best tokens of a row that the selector chooses among; 0: it has no selector."""
    taps: int = 0
    """Inputs of a block, itself included, that a short convolution reads for one; 0: it has none."""
    tap_group: int = 1
    """Neighbouring elements that share what an input adds to the convolution's kernel."""
    input_scale: float = 1.0
    """Of the embeddings of a block's inputs."""
    logit_scale: float = 1.0
    """Of the logits, before they are bounded."""
    bias: bool = False
    """Of the attention's projections."""
    rope_interleaved: bool = False
    """Rotates neighbouring elements; otherwise, elements half a head apart."""
    windows: tuple[int | None, ...] = ()
    """For each layer, how many positions back a row sees, itself included; None: all. Empty: all layers see all."""
    causal: Causal = "windows"
    """Layers in which an input sees nothing of its block behind itself: none, those with a window, or all."""
    soft_cap: float | None = None
    """Bound of the logits, by tanh; None: unbounded."""

    def is_causal(self, window: int | None) -> bool:
        """Whether a layer of this window is."""
        return self.causal == "all" or (self.causal == "windows" and window is not None)

    @property
    def kind(self) -> Literal["dflash", "dspark", "dflash2"]:
        """What the drafter is called."""
        return "dspark" if self.markov else "dflash2" if self.choices or self.taps else "dflash"

    @property
    def rows(self) -> int:
        """Tokens that one block guesses."""
        return self.block if self.anchor_predicts else self.block - 1

    @property
    def masks(self) -> int:
        """Mask tokens behind the anchor."""
        return self.block - 1


class Eagle3Form(DecoderForm, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Variants of a network, whichever family of checkpoints it came from."""

    head_size: int
    """Tokens of the drafter's head."""
    biases: tuple[str, ...] = ()
    """Linear layers that have a bias: `fc`, `midlayer.self_attn.q_proj`, ..."""
    own_embedding: bool = False
    """Else the target's embedding is used, which `ends` gives."""
    own_head: bool = True
    """Else the target's head is used."""
    norm_heads: bool = False
    """Queries and keys are normed a head, as in Qwen3."""
    norm_before_residual: bool = False
    """The layer's residual is the normed feature."""
    norm_before_fc: bool = False
    """One norm over the joined outputs."""
    fc_norm: bool = False
    """One norm an output."""
    norm_output: bool = False
    """The next row reads the normed output (EAGLE-3.1)."""
    mask_token: int | None = None
    """The input of rows behind the known tokens, beside a learnt stand-in for a feature (P-EAGLE)."""
    depths: int = 1
    """Tokens that one forward guesses behind one another."""


class MtpForm(msgspec.Struct, frozen=True, kw_only=True):
    """A head whose decoder layer is that of its target's architecture."""

    architecture: str
    """`model_type` of the checkpoint."""
    config: dict[str, Any]
    """Of the text model, as published."""


class Drafter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A trained drafter in a folder."""

    kind: DrafterKind
    format: str
    """Whose format its files have."""
    form: BlockForm | Eagle3Form | MtpForm
    """Of its network."""
    width: int
    """Elements of one output of the target."""
    stated_outputs: tuple[int, ...] | None = None
    """Those, counted as `protocol.messages.features` counts them; None: they follow from the target's depth."""
    target_layers: int | None = None
    """Layers of its target; None: not stated."""
    target_vocabulary: int | None = None
    layers: int = 1
    """Its own decoder layers."""
    parameters: int = 0
    """Of an MTP head, which shares its folder with a target."""

    @property
    def name(self) -> str:
        return KINDS[self.kind].name

    @property
    def engine(self) -> str:
        return KINDS[self.kind].engine

    def outputs(self, target: TargetShape) -> tuple[int, ...]:
        """The outputs of this target that it reads, ascending.

        EAGLE-3 without stated outputs takes those of SafeAILab's code (eagle/model/modeling_llama_kv.py): a low, a
        middle and a high one, which are the inputs of the layers 2, L / 2 and L - 3.
        """
        if self.stated_outputs is not None:
            return self.stated_outputs
        return (1, target.layers // 2 - 1, target.layers - 4)

    def fitting(self, folder: Path, target: Path) -> TargetShape:
        """The shape of the model in the folder `target`. Raises InputError if this drafter, which is in `folder`, can't
        draft for it."""
        shape = ModelFolder(target).shape
        if misfit := self.misfit(shape):
            raise InputError(
                f"The draft {folder} does not fit the target {target}: {misfit}. Choose a drafter that was trained for "
                "this target; `launch-pipeline pairs` lists some."
            )
        return shape

    def misfit(self, target: TargetShape) -> str:
        """Why it can't draft for this target, as half a sentence; empty if it can."""
        if self.width and self.width != target.width:
            return f"it reads states of {self.width:,} numbers, and the target's have {target.width:,}"
        if self.target_layers is not None and self.target_layers != target.layers:
            return f"its target has {self.target_layers} layers, and this one has {target.layers}"
        if self.target_vocabulary is not None and self.target_vocabulary != target.vocabulary:
            return f"its target knows {self.target_vocabulary:,} tokens, and this one knows {target.vocabulary:,}"
        return _absent(self.outputs(target), target.layers)


def _absent(outputs: tuple[int, ...], layers: int) -> str:
    if any(later <= earlier for earlier, later in pairwise(outputs)):
        return f"the outputs that it reads coincide in a target of {layers} layers"
    if outputs and max(outputs) >= layers:
        return f"it reads the output of layer {max(outputs)}, counted from 0, and the target has {layers} layers"
    return ""
