"""Candidates of block drafters: among the few tokens of a selector, or from rows that are ranked once a block.

Neither does work over the vocabulary in a growth step inside a block. Of a selector's few tokens all is computed on the
processor, wherever the model runs, and noise is drawn for them alone. A row that does not depend on the token before it
is ranked when its block is computed; guesses by prompt lookup raise a few of its columns. Knows no model and no tree.
"""

import math
from collections.abc import Sequence
from itertools import zip_longest
from typing import TypeAlias

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from draft_worker.candidates.head_columns import Columns
from draft_worker.candidates.ranking import MIN_CANDIDATES, mix, propose
from draft_worker.engine_interface import Batch
from protocol.messages.sampling import Sampling
from protocol.sampling.threefry import gumbel, noise_bits
from protocol.sampling.top_tokens import log_total
from protocol.speculation.token_tree import Candidates

Tokens: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float32]
Rows: TypeAlias = npt.NDArray[np.integer]
Codes: TypeAlias = npt.NDArray[np.float32] | npt.NDArray[np.float16] | npt.NDArray[np.uint16]
"""(vocabulary, rank); bfloat16 as its bits, uint16."""
_UNLIKELY = -1e9
"""The logit of a token that is a candidate by prompt lookup alone."""


class SelectorTables:
    """The codebooks of a selector (`block.ChoiceSelector`), of which the host reads rows."""

    def __init__(self, predecessors: Codes, successors: Codes) -> None:
        self._predecessors = predecessors
        self._successors = successors

    @classmethod
    def of(cls, predecessors: mx.array, successors: mx.array) -> "SelectorTables":
        """The same memory."""
        return cls(host_memory(predecessors), host_memory(successors))

    def corrections(self, tokens: Rows, latents: Floats, choices: Rows) -> Floats:
        """(L, K) numbers to add to the logits of (L, K) `choices`, finite.

        `tokens` (L,): those before the rows. `latents` (L, rank): projections of the rows' states.
        """
        before: Floats = host_rows(self._predecessors, tokens) * latents
        found: Floats = host_rows(self._successors, choices) @ before[..., None]
        return np.nan_to_num(found[..., 0])


def host_memory(codes: mx.array) -> Codes:
    """The memory of evaluated numbers, which the host reads where they are."""
    return np.asarray(codes.view(mx.uint16) if codes.dtype == mx.bfloat16 else codes)


def host_rows(codes: Codes, tokens: Rows) -> Floats:
    """These rows of `host_memory`."""
    rows = codes[tokens]
    return (rows.astype(np.uint32) << 16).view(np.float32) if rows.dtype == np.uint16 else rows.astype(np.float32)


def propose_among(
    tokens: Tokens,
    logits: Floats,
    positions: Sequence[int],
    sampling: Sampling,
    batch: Batch,
    vocabulary: int,
    shared: int,
) -> list[Candidates]:
    """Candidates for each row of (L, K) `tokens` with these (L, K) `logits`, mixed with the batch's followers.

    `positions`: as in `ranking.propose`. The noise is that of a target of `vocabulary` tokens, which shares the tokens
    below `shared` with the draft. The batch has no logits processors.
    """
    logits = np.where(tokens < shared, logits, -np.inf).astype(np.float32)
    tokens = np.where(tokens < shared, tokens, 0)
    if any(batch.followers):
        tokens, logits = _beside(tokens, logits, batch, shared)
        mix(logits, _columns(tokens, logits, batch, shared), sampling.temperature)
    if not sampling.greedy:
        at = np.asarray(positions)[:, None]
        noise = gumbel(noise_bits(sampling.seed, at, tokens, vocabulary))
        logits = logits / np.float32(sampling.temperature) + noise
    return _ranked(tokens, logits, max(batch.limit, MIN_CANDIDATES))


def _ranked(tokens: Tokens, scores: Floats, limit: int) -> list[Candidates]:
    """By falling score; of equals, lower tokens first. Those of -inf are none."""
    order = np.lexsort((tokens, -scores), axis=-1)
    best = np.take_along_axis(scores, order, axis=-1)
    peak = np.where(np.isfinite(best[:, :1]), best[:, :1], 0.0)
    weights = np.exp(best - peak)
    chances = np.minimum(weights / np.maximum(weights.sum(axis=-1, keepdims=True), 1e-30), 1.0)
    counts = np.minimum((chances > 0).sum(axis=-1), limit).tolist()
    named = np.take_along_axis(tokens, order, axis=-1).tolist()
    return [
        Candidates(row[:count], shares[:count])
        for row, shares, count in zip(named, chances.tolist(), counts, strict=True)
    ]


def _beside(tokens: Tokens, logits: Floats, batch: Batch, shared: int) -> tuple[Tokens, Floats]:
    """Further columns for the followers that a row lacks; columns that a row does not need are never chosen."""
    known = [set(row) for row in tokens.tolist()]
    lacking = [
        [token for token, _ in followers if token < shared and token not in row]
        for followers, row in zip(batch.followers, known, strict=True)
    ]
    if not any(lacking):
        return tokens, logits
    more = np.array(list(zip_longest(*lacking, fillvalue=-1)), np.int64).T
    beside = np.where(more < 0, -np.inf, _UNLIKELY).astype(np.float32)
    return np.concatenate([tokens, np.maximum(more, 0)], axis=1), np.concatenate([logits, beside], axis=1)


def _columns(tokens: Tokens, logits: Floats, batch: Batch, shared: int) -> list[list[tuple[int, float]]]:
    """The followers of each row, as its columns."""
    found = []
    for followers, row, scores in zip(batch.followers, tokens.tolist(), logits.tolist(), strict=True):
        known = {token: place for place, token in enumerate(row) if scores[place] > -np.inf} if followers else {}
        found.append([(known[token], chance) for token, chance in followers if token < shared and token in known])
    return found


class RankedRows:
    """The rows of one block, for a request with this sampling."""

    def __init__(self, logits: mx.array, first: int, columns: Columns, sampling: Sampling, limit: int) -> None:
        """`logits`: (rows, the columns or more), finite. `first`: absolute position of the token that the first row
        guesses. `limit`: candidates wanted of a row."""
        self.limit = limit
        self._first = first
        self._columns = columns
        self._sampling = sampling
        self._scale = sampling.temperature or 1.0
        logits = logits[:, : columns.count]
        batch, positions = Batch((), (), (), limit), range(first, first + len(logits))
        self._found = propose(logits, positions, sampling, batch, columns.noise)
        self._named = [columns.named(found) for found in self._found]
        self._logits = host_memory(logits)
        self._totals: Sequence[float] = ()
        """At a temperature: the logarithm of each row's mass before noise."""
        if not sampling.greedy:
            self._totals = np.asarray(log_total(logits.astype(mx.float32) / self._scale))[:, 0].tolist()

    def candidates(self, row: int, followers: Sequence[tuple[int, float]], limit: int) -> Candidates:
        """As `Columns.propose` for this row, with at most the rows' own `limit` and no logits processors.

        `followers`: columns with their probabilities.
        """
        found, count = self._named[row], max(limit, MIN_CANDIDATES)
        if followers:
            found = self._columns.named(self._mixed(row, followers))
        if len(found.tokens) <= count:
            return found
        return Candidates(found.tokens[:count], found.probabilities[:count])

    def _mixed(self, row: int, followers: Sequence[tuple[int, float]]) -> Candidates:
        """`ranking.mixed`, in shares of the mass of the row's scores.

        A follower's score rises by log(1 + odds / p), where p is its probability before noise. So its share s rises by
        odds * s / p, and s / p is the exponential of its noise over the mean of all tokens' exponentials.
        """
        found, kept = self._found[row], 1.0 - sum(chance for _, chance in followers)
        columns = [found.tokens[0], *(column for column, _ in followers)]
        scores = (host_rows(self._logits[row], np.array(columns)) / self._scale).tolist()
        noise = self._noise(row, columns)
        noisy = scores[0] + noise[0] - math.log(found.probabilities[0])
        mean = noisy - self._totals[row] if self._totals else 0.0
        shares, mass = dict(zip(found.tokens, found.probabilities, strict=True)), 1.0
        for (column, chance), score, own in zip(followers, scores[1:], noise[1:], strict=True):
            rise = chance / kept * math.exp(own - mean)
            shares[column] = math.exp(score + own - noisy) + rise
            mass += rise
        # A sort is stable: the others keep their order.
        ranked = sorted(shares, key=shares.__getitem__, reverse=True)
        return Candidates(ranked, [min(shares[column] / mass, 1.0) for column in ranked])

    def _noise(self, row: int, columns: Sequence[int]) -> Sequence[float]:
        if self._sampling.greedy:
            return [0.0] * len(columns)
        drawn = self._columns.noise.row(self._sampling.seed, self._first + row)
        return np.asarray(drawn)[columns].tolist()
