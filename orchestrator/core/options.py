"""What the user chose about speculation, checked."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

PrefillMode = Literal["auto", "always"]
StrategyName = Literal["ar", "sd", "ssd", "adaptive"]
Fallback = Literal["neural", "fast", "adaptive"]


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to speculate. Every field has a default that suits the default strategy."""

    strategy: StrategyName = "adaptive"
    draft_tokens: Annotated[int, Meta(ge=1, le=64)] = 4
    """K: chain length of sd and ssd."""
    draft_width: Annotated[int, Meta(ge=1, le=256)] = 16
    """W: most nodes that a growth step evaluates (adaptive); half as many where so many are dear."""
    draft_fan: Annotated[int, Meta(ge=1, le=64)] = 8
    """F: children a node gets (adaptive)."""
    max_verify: Annotated[int, Meta(ge=1, le=256)] = 16
    """Most draft nodes the target verifies in one round."""
    fan_budget: Annotated[int, Meta(ge=1, le=1024)] = 15
    """B: bonus guesses of ssd over all positions of the chain."""
    fallback: Fallback = "adaptive"
    """What ssd does on a miss."""
    saguaro: Annotated[float, Meta(ge=0.0, le=1.0)] = 1.0
    """C: factor on the draft's cached tokens in ssd with rejection verification (1 changes nothing).

    What the draft draws then depends on the fan-out, which is learned as it goes: a seed fixes no output."""
    prefill: PrefillMode = "auto"
    """Whether a prefill worker, if there is one, reads a prompt: when that was measured to be faster, or always."""
    concurrent: Annotated[int, Meta(ge=1, le=64)] = 16
    """Requests that are decoded at the same time; the others wait for their turn."""
    turn: Annotated[int, Meta(ge=1, le=1 << 20)] = 256
    """Tokens after which a request makes room for one that waits. What was evaluated of it lies in shared memory, so
    that coming back costs little."""
    kv_memory: Annotated[int, Meta(ge=0, le=1 << 24)] = 2048
    """MiB of shared memory for KV that outlives its request or its worker; 0 keeps none, anywhere."""
    kept_memory: Annotated[int, Meta(ge=0, le=1 << 24)] = 512
    """MiB of each worker's own memory for KV of requests that are over, beside that."""
