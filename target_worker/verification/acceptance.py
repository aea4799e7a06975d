"""The result of a verification, and the log-probabilities of its tokens. Knows no acceptance rule."""

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from protocol.messages.base import LEAST_LOG_PROBABILITY
from protocol.messages.sampling import Likelihood


class Acceptance(NamedTuple):
    """The accepted entries from the root down, and the bonus token behind them."""

    accepted: tuple[int, ...]
    bonus: int
    likelihoods: tuple[Likelihood, ...] = ()
    """Likelihoods of the accepted tokens and the bonus token, if the request wants log-probabilities."""


def as_ids(picks: mx.array) -> list[int]:
    """Evaluate `picks` and convert them to Python numbers."""
    return np.array(picks).tolist()


def likelihoods(logits: mx.array, rows: Sequence[int], tokens: Sequence[int], count: int) -> tuple[Likelihood, ...]:
    """The likelihood of each `tokens[i]` and the `count` most probable tokens, by row `rows[i]` of the model's (L, V)
    unprocessed `logits`."""
    chosen = logits[mx.array(list(rows))].astype(mx.float32)
    logs = chosen - mx.logsumexp(chosen, axis=-1, keepdims=True)
    return tuple(
        Likelihood(_bounded(float(row[token])), _best(row, count))
        for row, token in zip(np.array(logs), tokens, strict=True)
    )


def _best(row: np.ndarray, count: int) -> tuple[tuple[int, float], ...]:
    """The `count` most probable tokens; of equals, lower ids first."""
    if not count:
        return ()
    least = np.partition(row, -count)[-count] if count < len(row) else -np.inf
    ids = np.flatnonzero(row >= least)
    order = ids[np.argsort(-row[ids], kind="stable")][:count]
    return tuple((int(id), _bounded(float(row[id]))) for id in order)


def _bounded(value: float) -> float:
    # Rounding can raise the logarithm of a probability of 1 above 0.
    return min(0.0, max(LEAST_LOG_PROBABILITY, value))
