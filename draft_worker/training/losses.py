"""How far a drafter's guesses are from the target's choices."""

from typing import NamedTuple

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
    scaled = logits / (target.temperature or 1.0)
    logs = scaled - mx.logsumexp(scaled, axis=-1, keepdims=True)
    cross = -(target.p * logs).sum(-1)
    if target.temperature == 0:
        second = -mx.take_along_axis(logs, target.best[:, None], axis=-1)[:, 0]
    else:
        second = 0.5 * mx.abs(mx.softmax(scaled, axis=-1, precise=True) - target.p).sum(-1)
    return DIVERGENCE * cross + VARIATION * second
