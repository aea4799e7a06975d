"""Mixes what a draft believes with guesses by prompt lookup. Knows no tree, no text and no noise.

A text repeats itself more than a small draft expects: names, code, the question in the answer. Each follower of a
place's last tokens comes with the probability that lookup gives it; the draft keeps the rest of the mass. So its logits
only rise at the followers' columns.
"""

from collections.abc import Sequence
from typing import TypeAlias

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
    counts = [len(followers[row]) for row in rows]
    totals = log_total(chosen / scale)[mx.array(np.repeat(np.arange(len(rows)), counts)), 0]
    columns = [column for row in rows for column, _ in followers[row]]
    where = mx.array(np.repeat(rows, counts)), mx.array(columns)
    odds = mx.array(np.concatenate([_log_odds(followers[row]) for row in rows]))
    own = logits[where]
    raised = scale * mx.logaddexp(own / scale, odds + totals)
    return logits.at[where].maximum(mx.where(own > -mx.inf, raised, own))


def mix(logits: npt.NDArray[np.float32], followers: Followers, temperature: float) -> None:
    """`mixed`, in place."""
    scale = temperature or 1.0
    for row, found in zip(logits, followers, strict=True):
        if not found:
            continue
        columns = [column for column, _ in found]
        scaled, best = row / scale, row.max() / scale
        total = best + np.log(np.exp(scaled - best).sum())
        raised = scale * np.logaddexp(scaled[columns], _log_odds(found) + total)
        row[columns] = np.where(row[columns] > -np.inf, raised, -np.inf)


def _log_odds(found: Sequence[tuple[int, float]]) -> npt.NDArray[np.float32]:
    """Of each follower, against the mass that the draft keeps."""
    chances = np.array([probability for _, probability in found])
    return np.log(chances / (1.0 - chances.sum())).astype(np.float32)
