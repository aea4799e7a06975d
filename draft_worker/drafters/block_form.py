"""Sizes and options of a block drafter (DFlash, DSpark), as its config.json states them. Knows no MLX and no file."""

from typing import Any, Literal

import msgspec

MarkovKind = Literal["vanilla", "gated", "rnn"]
Causal = Literal["none", "windows", "all"]


class BlockForm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A drafter whose forward guesses a block of tokens behind an anchor.

    The input of a block is the anchor (the last known token) and then mask tokens, at consecutive positions. DFlash
    guesses a mask's own token at its row. DSpark guesses at each row the token behind it, so that the anchor's row
    counts too (`anchor_predicts`).
    """

    width: int
    """Elements of the drafter's states."""
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    inner: int
    """Elements between the two halves of the feed-forward part."""
    vocabulary: int
    outputs: tuple[int, ...]
    """Layers of the target whose outputs it reads, counted from 0, ascending."""
    output_width: int
    """Elements of one output of the target."""
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
    """Elements of a token's vector in the Markov head."""
    confidence: Literal["none", "state", "markov"] = "none"
    """What the confidence head reads: a row's state, alone or with the Markov vector of the token before it."""
    norm_epsilon: float = 1e-6
    bias: bool = False
    """Of the attention's projections."""
    rope_base: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    rope_interleaved: bool = False
    """Rotates neighbouring elements; otherwise, elements half a head apart."""
    positions: int
    """The most positions."""
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
    def rows(self) -> int:
        """Tokens that one block guesses."""
        return self.block if self.anchor_predicts else self.block - 1

    @property
    def masks(self) -> int:
        """Mask tokens behind the anchor."""
        return self.block - 1
