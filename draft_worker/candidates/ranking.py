"""Candidates from a draft's logits: the tokens that the target will probably sample. Knows no trees or messages.

All rows are evaluated together, and only the best few tokens of a vocabulary become Python numbers.

A text repeats itself more than a small draft expects: names, code, the question in the answer. So logits may be mixed
with guesses by prompt lookup. Each follower of a place's last tokens comes with the probability that lookup gives it,
and the draft keeps the rest of the mass: its logits only rise at the followers' columns.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from draft_worker.engine_interface import Batch
from protocol.messages.sampling import Sampling
from protocol.sampling.gumbel_noise import NoiseRows, scores
from protocol.sampling.top_tokens import log_total, top
from protocol.speculation.token_tree import Candidates

MIN_CANDIDATES = 4
"""At least this many candidates are computed: they cost nothing, and a later growth plan may use them."""


def propose(
    logits: mx.array, positions: Sequence[int], sampling: Sampling, batch: Batch, noise: NoiseRows
) -> list[Candidates]:
    """Candidates for each row of (L, V) `logits`; `positions[i]` is the absolute position of row i's next token.

    `batch` gives the number of candidates and the logits processors.
    """
    if batch.processors is not None:
        logits = batch.processors.apply(logits, batch.paths)
    scored = scores(logits, positions, sampling, noise)
    # With the target's own logits, the first is the token it samples.
    ids, values = top(scored, min(max(batch.limit, MIN_CANDIDATES), scored.shape[-1]))
    mx.async_eval(ids, values)
    # Rounding can raise a probability of 1 above 1.
    chances = mx.minimum(mx.exp(values - log_total(scored)), 1.0)
    return [
        Candidates(tokens, row) if row[-1] > 0 else _possible(tokens, row)
        for tokens, row in zip(np.asarray(ids).tolist(), np.asarray(chances).tolist(), strict=True)
    ]


def _possible(tokens: Sequence[int], chances: Sequence[float]) -> Candidates:
    """The candidates without the tokens that the filters dropped."""
    count = sum(chance > 0 for chance in chances)
    return Candidates(tokens[:count], chances[:count])


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
