"""Candidates from a draft's logits: the tokens that the target will probably sample. Knows no trees or messages.

All rows are evaluated together, and only the best few tokens of a vocabulary become Python numbers.
"""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from draft_worker.engine import Batch
from protocol.messages.base import MAX_SUPPORT
from protocol.messages.sampling import Sampling
from protocol.sampling.sampler import NoiseRows, scores
from protocol.sampling.threefry import draft_stream
from protocol.sampling.top_tokens import log_total, top
from protocol.speculation.token_tree import Candidates, Support

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
    if sampling.verification == "rejection" and not sampling.greedy:
        return _drawn(logits.astype(mx.float32) / sampling.temperature, positions, sampling, batch, noise)
    ranked = _ranked(scores(logits, positions, sampling, noise), batch.limit)
    if sampling.verification == "rejection":
        return [found._replace(support=Support(found.tokens[:1], (1.0,))) for found in ranked]
    return ranked


def block_places(batch: Batch, rows: int) -> Sequence[int]:
    """`batch.places`, of so many nodes."""
    return batch.places or [0] * rows


def _ranked(scored: mx.array, limit: int) -> list[Candidates]:
    """Candidates by falling score, noise included. With the target's own logits, the first is the token it samples."""
    ids, values = top(scored, min(max(limit, MIN_CANDIDATES), scored.shape[-1]))
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


def _drawn(
    scaled: mx.array, positions: Sequence[int], sampling: Sampling, batch: Batch, noise: NoiseRows
) -> list[Candidates]:
    """The first candidate is a sample of the draft's renormalised best tokens (Leviathan et al. 2023)."""
    ids, values = top(scaled, min(MAX_SUPPORT, scaled.shape[-1]))
    places = block_places(batch, len(positions))
    rows = mx.stack(
        [
            noise.row(sampling.seed, position, draft_stream(place))
            for position, place in zip(positions, places, strict=True)
        ]
    )
    gumbel = mx.take_along_axis(rows, ids, axis=-1)
    mx.eval(ids, values, gumbel)
    best = np.asarray(values).astype(np.float64)
    chances = np.exp(best - best[:, :1])
    chances /= chances.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        picks = np.argmax(np.log(chances) + np.asarray(gumbel), axis=-1)
    return [
        _with_main(tokens, chance, int(pick), max(batch.limit, MIN_CANDIDATES))
        for tokens, chance, pick in zip(np.asarray(ids).tolist(), chances.tolist(), picks, strict=True)
    ]


def _with_main(tokens: list[int], chances: list[float], pick: int, limit: int) -> Candidates:
    """The drawn token, then the other tokens by falling probability."""
    order = [pick, *(rank for rank in range(len(tokens)) if rank != pick and chances[rank] > 0)][:limit]
    support = [rank for rank in range(len(tokens)) if chances[rank] > 0]
    return Candidates(
        [tokens[rank] for rank in order],
        [chances[rank] for rank in order],
        Support([tokens[rank] for rank in support], [chances[rank] for rank in support]),
    )
