"""Mixes what a draft believes with guesses by prompt lookup. Knows no tree, no text and no noise.

A text repeats itself more than a small draft expects: names, code, the question in the answer. Each follower of a
place's last tokens comes with the probability that lookup gives it; the draft keeps the rest of the mass. So its logits
only rise at the followers' columns.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from protocol.sampling.top_tokens import log_total

Followers: TypeAlias = Sequence[Sequence[tuple[int, float]]]
"""For each row, columns with their probabilities, which sum to less than 1."""


def mixed(logits: mx.array, followers: Followers, temperature: float) -> mx.array:
    """(L, V) float32 logits whose softmax at `temperature` is (1 - c) p + f, where p is that of `logits`, f the
    followers of a row and c their sum. Temperature 0 counts as 1. A column of -inf stays one."""
    logits = logits.astype(mx.float32)
    rows = [row for row, found in enumerate(followers) if found]
    if not rows:
        return logits
    scale = temperature or 1.0
    chosen = logits if len(rows) == len(logits) else logits[mx.array(rows)]
    raised = _Raised.of([followers[row] for row in rows])
    totals = log_total(chosen / scale)[mx.array(raised.rows), 0]
    where = mx.array(np.array(rows)[raised.rows]), mx.array(raised.columns)
    own = logits[where]
    mixture = scale * mx.logaddexp(own / scale, mx.array(raised.log_odds) + totals)
    return logits.at[where].maximum(mx.where(own > -mx.inf, mixture, own))


def mix(logits: npt.NDArray[np.float32], followers: Followers, temperature: float) -> None:
    """`mixed`, in place."""
    raised, scale = _Raised.of(followers), temperature or 1.0
    totals = np.zeros(len(logits), np.float32)
    for row in dict.fromkeys(raised.rows):
        scaled = logits[row] / scale
        best = scaled.max()
        totals[row] = best + np.log(np.exp(scaled - best).sum())
    own = logits[raised.rows, raised.columns]
    mixture = scale * np.logaddexp(own / scale, raised.log_odds + totals[raised.rows])
    logits[raised.rows, raised.columns] = np.where(own > -np.inf, mixture, -np.inf)


class _Raised(NamedTuple):
    """Every follower, by rows."""

    rows: list[int]
    columns: list[int]
    log_odds: npt.NDArray[np.float32]
    """Against the mass that the draft keeps."""

    @classmethod
    def of(cls, followers: Followers) -> "_Raised":
        rows, columns, odds = list[int](), list[int](), list[float]()
        for row, found in enumerate(followers):
            kept = 1.0 - sum(probability for _, probability in found)
            rows += [row] * len(found)
            columns += [column for column, _ in found]
            odds += [probability / kept for _, probability in found]
        return cls(rows, columns, np.log(np.array(odds)).astype(np.float32))
