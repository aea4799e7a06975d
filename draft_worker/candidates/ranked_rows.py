"""Candidates of a block's rows, found once for all tree nodes that stand at the same place. Knows no tree.

A row that does not depend on the token before it is ranked when its block is computed. So a growth step inside the
block does no work over the vocabulary. Guesses by prompt lookup raise a few columns of a row: their logits and their
noise suffice, because the row's mass is known.
"""

import math
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from draft_worker.candidates.columns import Columns
from draft_worker.candidates.few_tokens import host_memory, host_rows
from draft_worker.candidates.ranking import MIN_CANDIDATES, propose
from draft_worker.engine import Batch
from protocol.messages.sampling import Sampling
from protocol.sampling.threefry import NoiseStream
from protocol.sampling.top_tokens import log_total
from protocol.speculation.token_tree import Candidates


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
        """`lookup_mixture.mixed`, in shares of the mass of the row's scores.

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
        drawn = self._columns.noise.row(self._sampling.seed, self._first + row, NoiseStream.SAMPLE)
        return np.asarray(drawn)[columns].tolist()
