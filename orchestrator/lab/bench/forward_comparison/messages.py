"""Arguments and reports of a process that times a target's forwards and mlx-lm's own in turns. Plain types."""

from typing import Literal, TypeAlias, get_args

import msgspec

LayerKind: TypeAlias = Literal["attention", "windows", "latent", "delta", "space", "convolution", "rwkv"]
"""Full attention; sliding windows; latent KV; Gated DeltaNet; state space; short convolutions; a recurrence whose trees
are not evaluated."""
LAYER_KINDS: tuple[LayerKind, ...] = get_args(LayerKind)
ModelSize: TypeAlias = Literal["measured", "tiny"]
"""measured: 200 to 400 million parameters, more than a processor's caches hold; tiny: tests of the program."""


class ComparisonOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The last argument of the process, in JSON."""

    kinds: tuple[LayerKind, ...] = LAYER_KINDS
    size: ModelSize = "measured"
    widths: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Tokens of a forward."""
    round: int = 8
    """Tokens of the round of which half are accepted."""
    context: int = 256
    """Committed tokens before a forward."""
    samples: int = 12
    """Forwards of each width."""


class Built(msgspec.Struct, frozen=True, tag="built", forbid_unknown_fields=True):
    """The random model of a kind is ready."""

    kind: LayerKind
    architecture: str
    level: str
    """tree, chain or plain."""
    parameters: int


class Sampled(msgspec.Struct, frozen=True, tag="sampled", forbid_unknown_fields=True):
    """One forward of each width by everyone, in turns. Milliseconds by width, logits included; on a processor they are
    processor time."""

    kind: LayerKind
    stock: dict[int, float]
    """mlx-lm's own cache, a chain."""
    chain: dict[int, float]
    """Ours, the same tokens."""
    tree: dict[int, float]
    """Ours, the same tokens as a binary tree; empty below level tree."""
    round: float
    """Ours, a chain of `round` tokens."""
    undo: float
    """Milliseconds until half of that chain is committed and the rest undone. If the cache evaluates tokens again in
    the next forward, what that forward takes longer."""


ComparisonReport: TypeAlias = Built | Sampled
"""One JSON object a line of the process's standard output."""
