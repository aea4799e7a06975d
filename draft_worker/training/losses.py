"""How far a drafter's guesses are from the target's choices, with gradients that need one softmax."""

from typing import Any, NamedTuple

import mlx.core as mx

DIVERGENCE = 0.6
VARIATION = 1.0


class Wanted(NamedTuple):
    """What the target chooses at n places."""

    p: mx.array
    """(n, head) probabilities, at the temperature of the text, at 1 in greedy text."""
    best: mx.array
    """(n,) its best token among the head's."""
    temperature: float


def wanted(logits: mx.array, temperature: float) -> Wanted:
    """Of the target's (n, head) logits."""
    p = mx.softmax(logits / (temperature or 1.0), axis=-1, precise=True)
    return Wanted(mx.stop_gradient(p), mx.argmax(logits, axis=-1), temperature)


def loss(logits: mx.array, target: Wanted) -> mx.array:
    """(n,) losses of a drafter's (n, head) logits.

    In text written at T > 0: DIVERGENCE x H(p, q) + VARIATION x TV(p, q), with p and q the softmax of target and
    drafter at T, and H the cross entropy, which is KL(p, q) and a constant. A guess with shared noise is right with a
    probability that 1 - TV bounds; H teaches more while q is far from p (both: Zhou et al. 2023, DistillSpec, arXiv
    2310.08461). In greedy text the target's choice is its best token: DIVERGENCE x H at T = 1 + VARIATION x the cross
    entropy of that token.
    """
    greedy = target.temperature == 0

    @mx.custom_function
    def value(scaled: mx.array, p: mx.array, best: mx.array) -> tuple[mx.array, mx.array]:
        q = mx.softmax(scaled, axis=-1, precise=True)
        normaliser = _at(scaled, best) - mx.log(mx.maximum(_at(q, best), 1e-30))
        cross = normaliser - (p * scaled).sum(-1)
        second = normaliser - _at(scaled, best) if greedy else 0.5 * mx.abs(q - p).sum(-1)
        return DIVERGENCE * cross + VARIATION * second, q

    @value.vjp
    def gradient(primals: list, cotangents: list, outputs: list) -> tuple[mx.array, mx.array, mx.array]:
        (_, p, best), q = primals, outputs[1]
        towards = q - p
        if greedy:
            second = q - (mx.arange(q.shape[-1]) == best[:, None])
        else:
            weighted = 0.5 * mx.sign(towards) * q
            second = weighted - q * weighted.sum(-1, keepdims=True)
        each = DIVERGENCE * towards + VARIATION * second
        return cotangents[0][:, None] * each, mx.zeros_like(p), mx.zeros_like(best)

    both: Any = value(logits / (target.temperature or 1.0), target.p, target.best)
    return both[0]


def _at(values: mx.array, tokens: mx.array) -> mx.array:
    return mx.take_along_axis(values, tokens[:, None], axis=-1)[:, 0]
