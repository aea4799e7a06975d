"""The result of a verification, and the log-probabilities of its tokens. Knows no acceptance rule."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from protocol.messages.base import LEAST_LOG_PROBABILITY
from protocol.messages.sampling import Likelihood
from protocol.sampling.top_tokens import log_total, top


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
    totals = log_total(chosen)
    logs = mx.take_along_axis(chosen, mx.array(list(tokens))[:, None], axis=-1) - totals
    if not count:
        return tuple(Likelihood(_bounded(log)) for (log,) in _numbers(logs))
    ids, best = top(chosen, min(count, chosen.shape[-1]))
    best = best - totals
    mx.eval(logs, ids, best)
    return tuple(
        Likelihood(_bounded(log), tuple(zip(alternatives, map(_bounded, likely), strict=True)))
        for (log,), alternatives, likely in zip(_numbers(logs), _numbers(ids), _numbers(best), strict=True)
    )


def _numbers(rows: mx.array) -> list[list[Any]]:
    """Evaluate (L, n) `rows` and convert them to Python numbers."""
    return np.array(rows).tolist()


def _bounded(value: float) -> float:
    # Rounding can raise the logarithm of a probability of 1 above 0.
    return min(0.0, max(LEAST_LOG_PROBABILITY, value))
