"""Whether a target computes what training takes for granted: a plain embedding, RMSNorm and head around its layers.

Knows no drafter.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from draft_worker.training.target import Target
from protocol.errors import InputError
from protocol.inference.observed_modules import observing

_TOKENS = 8
_TOLERANCE = 0.1
"""Largest deviation, relative to the largest number: 8 bits and fp16 deviate by 0.01, a scale by far more."""


def require_plain(target: Target) -> None:
    """Raises InputError naming what differs: such a training would copy or imitate something else than the target."""
    first, norm = target.stack.layers[0], target.stack.norm
    calls: dict[int, tuple[mx.array, mx.array]] = {}

    def see(module: nn.Module, arguments: tuple[Any, ...], result: Any) -> Any:
        calls[id(module)] = arguments[0], result
        return result

    tokens = mx.arange(_TOKENS) * (target.vocabulary // _TOKENS)
    with observing([first, norm], see):
        logits = target.model(tokens[None], cache=make_prompt_cache(target.model))
    if not {id(first), id(norm)} <= {*calls}:
        raise _refused(target, "does not call its first layer or its final norm")
    entering, (before, behind) = calls[id(first)][0], calls[id(norm)]
    # With a mean that is far from 0, by which a LayerNorm shows.
    shifted = before + mx.abs(before).max()
    if not _close(entering[0], target.embed(tokens)):
        raise _refused(target, "changes its embedding in front of the first layer (a scale, or positions)")
    if not _close(norm(shifted), mx.fast.rms_norm(shifted.astype(mx.float32), target.norm, target.norm_epsilon)):
        raise _refused(target, "has a final norm that is no RMSNorm with its stored weight")
    if not _close(logits, behind.astype(mx.float32) @ target.head().T):
        raise _refused(target, "changes its logits behind the head (a scale, a cap or a bias)")


def _close(found: mx.array, expected: mx.array) -> bool:
    found = found.astype(mx.float32)
    if found.size != expected.size:
        return False
    deviation = mx.abs(found.reshape(expected.shape) - expected).max()
    return float(deviation) <= _TOLERANCE * float(mx.abs(expected).max())


def _refused(target: Target, what: str) -> InputError:
    return InputError(f"{target.folder} {what}, which training can't imitate: choose a target of the Llama family.")
