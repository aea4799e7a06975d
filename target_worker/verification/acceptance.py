"""What a verification accepts, and how probable the target found those tokens. Knows no acceptance rule."""

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from protocol.messages.base import LEAST_LOG_PROBABILITY
from protocol.messages.sampling import Likelihood


class Acceptance(NamedTuple):
    """Entries accepted from the root down, and the bonus token behind them."""

    accepted: tuple[int, ...]
    bonus: int
    likelihoods: tuple[Likelihood, ...] = ()
    """Of the accepted tokens and the bonus token, if the request asks for them."""


def as_ids(picks: mx.array) -> list[int]:
    """Compute the picks and bring them to Python."""
    return np.array(picks).tolist()


def likelihoods(logits: mx.array, rows: Sequence[int], tokens: Sequence[int], count: int) -> tuple[Likelihood, ...]:
    """Of `tokens[i]` in row `rows[i]` of the model's own (L, V) `logits`, with the `count` most probable tokens of
    that row."""
    chosen = logits[mx.array(list(rows))].astype(mx.float32)
    logs = chosen - mx.logsumexp(chosen, axis=-1, keepdims=True)
    return tuple(
        Likelihood(_bounded(float(row[token])), _best(row, count))
        for row, token in zip(np.array(logs), tokens, strict=True)
    )


def _best(row: np.ndarray, count: int) -> tuple[tuple[int, float], ...]:
    """Equally probable tokens in the order of their ids."""
    if not count:
        return ()
    least = np.partition(row, -count)[-count] if count < len(row) else -np.inf
    ids = np.flatnonzero(row >= least)
    order = ids[np.argsort(-row[ids], kind="stable")][:count]
    return tuple((int(id), _bounded(float(row[id]))) for id in order)


def _bounded(value: float) -> float:
    # Rounding can lift a certain token's logarithm above 0.
    return min(0.0, max(LEAST_LOG_PROBABILITY, value))
