"""Candidates among a few tokens of each node, whose other tokens are not considered. Knows no model and no tree.

The work does not depend on the vocabulary: noise is drawn for these tokens alone. Arrays are small, so all is computed
on the processor, wherever the model runs.
"""

from collections.abc import Sequence
from itertools import zip_longest

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from draft_worker.candidates.lookup_mixture import mixed
from draft_worker.candidates.ranking import propose
from draft_worker.engine import Batch
from protocol.messages.sampling import Sampling
from protocol.sampling.threefry import NoiseStream, gumbel, noise_bits
from protocol.speculation.candidates import Candidates, Support

Tokens = npt.NDArray[np.int64]
_UNLIKELY = -1e9
"""The logit of a token that is a candidate by prompt lookup alone."""


def propose_among(
    tokens: Tokens,
    logits: npt.NDArray[np.float32],
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
    with mx.stream(mx.Device(mx.cpu)):
        scored = mx.array(logits)
        if any(batch.followers):
            tokens, scored = _beside(tokens, logits, batch, shared)
            scored = mixed(scored, _columns(tokens, np.asarray(scored), batch, shared), sampling.temperature)
        noise = _FewNoise(tokens, np.asarray(positions), vocabulary)
        found = propose(scored, range(len(tokens)), sampling, batch, noise)
    return [_named(each, row) for each, row in zip(found, tokens, strict=True)]


class _FewNoise:
    """`NoiseRows` whose rows are those of the nodes, not of positions: each node has its own tokens."""

    def __init__(self, tokens: Tokens, positions: npt.NDArray[np.integer], vocabulary: int) -> None:
        self._tokens, self._positions, self._vocabulary = tokens, positions[:, None], vocabulary
        self._rows: mx.array | None = None

    def row(self, seed: int, position: int, stream: NoiseStream) -> mx.array:
        if self._rows is None:
            self._rows = mx.array(gumbel(noise_bits(seed, self._positions, self._tokens, self._vocabulary, stream)))
        return self._rows[position]


def _beside(tokens: Tokens, logits: npt.NDArray[np.float32], batch: Batch, shared: int) -> tuple[Tokens, mx.array]:
    """Further columns for the followers that a row lacks; columns that a row does not need are never chosen."""
    lacking = [
        [token for token, _ in followers if token < shared and token not in row]
        for followers, row in zip(batch.followers, tokens, strict=True)
    ]
    if not any(lacking):
        return tokens, mx.array(logits)
    more = np.array(list(zip_longest(*lacking, fillvalue=-1)), np.int64).T
    beside = np.where(more < 0, -np.inf, _UNLIKELY).astype(np.float32)
    wider = np.concatenate([tokens, np.maximum(more, 0)], axis=1)
    return wider, mx.array(np.concatenate([logits, beside], axis=1))


def _columns(
    tokens: Tokens, logits: npt.NDArray[np.float32], batch: Batch, shared: int
) -> list[list[tuple[int, float]]]:
    """The followers of each row, as its columns."""
    found = []
    for followers, row, scores in zip(batch.followers, tokens, logits, strict=True):
        known = {int(token): place for place, token in enumerate(row) if scores[place] > -np.inf}
        found.append([(known[token], chance) for token, chance in followers if token < shared and token in known])
    return found


def _named(found: Candidates, row: Tokens) -> Candidates:
    """Candidates as tokens, from candidates as columns of their row."""
    support = found.support
    if support is not None:
        support = Support(row[list(support.tokens)].tolist(), support.probabilities)
    return Candidates(row[list(found.tokens)].tolist(), found.probabilities, support)
