"""Candidates from a draft's logits: the tokens that the target will probably sample. Knows no trees or messages.

All rows are evaluated together, and only the best few tokens of a vocabulary become Python numbers.
"""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from draft_worker.engine import Batch
from protocol.messages.base import MAX_SUPPORT
from protocol.messages.sampling import Sampling
from protocol.sampling.sampler import Noise, scores
from protocol.sampling.threefry import NoiseStream
from protocol.speculation.candidates import Candidates, Support

MIN_CANDIDATES = 4
"""At least this many candidates are computed: they cost nothing, and a later growth plan may use them."""
_BLOCK = 64
"""Entries of a block. Only blocks with high maxima are searched: to partition a whole vocabulary takes milliseconds."""


def propose(
    logits: mx.array, positions: Sequence[int], sampling: Sampling, batch: Batch, noise: Noise
) -> list[Candidates]:
    """Candidates for each row of (L, V) `logits`; `positions[i]` is the absolute position of row i's next token.

    `batch` gives the number of candidates, the logits processors, and Saguaro's factor and fans.
    """
    if batch.processors is not None:
        logits = batch.processors.apply(logits, batch.paths)
    if sampling.verification == "rejection" and not sampling.greedy:
        return _drawn(logits.astype(mx.float32) / sampling.temperature, positions, sampling, batch, noise)
    ranked = _ranked(scores(logits, positions, sampling, noise), batch.limit)
    if sampling.verification == "rejection":
        return [found._replace(support=Support(found.tokens[:1], (1.0,))) for found in ranked]
    return ranked


def top(scores: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """Ids and scores (L, count) of the best entries of each row of (L, V), best first; of equals, lower ids first.

    Only the `count` blocks with the highest maxima are searched: the best `count` entries lie there.
    """
    values, ids = _best_blocks(scores, count)
    if count < values.shape[-1]:
        # Ascending again, so that the sort below, which is stable, puts the lower of two equal ids first.
        chosen = mx.sort(mx.argpartition(-values, count - 1, axis=-1)[:, :count], axis=-1)
        values, ids = mx.take_along_axis(values, chosen, axis=-1), mx.take_along_axis(ids, chosen, axis=-1)
    order = mx.argsort(-values, axis=-1)
    return mx.take_along_axis(ids, order, axis=-1), mx.take_along_axis(values, order, axis=-1)


def _ranked(scored: mx.array, limit: int) -> list[Candidates]:
    """Candidates by falling score, noise included. With the target's own logits, the first is the token it samples."""
    ids, values = top(scored, min(max(limit, MIN_CANDIDATES), scored.shape[-1]))
    mx.async_eval(ids, values)
    chances = _softmax_at(scored, values)
    return [
        Candidates(tokens, row) if row[-1] > 0 else _possible(tokens, row)
        for tokens, row in zip(np.asarray(ids).tolist(), chances.tolist(), strict=True)
    ]


def _softmax_at(scored: mx.array, values: mx.array) -> npt.NDArray[np.float32]:
    """(L, n) softmax over each row of the (L, V) scores, at the scores `values`: (L, n), the highest first."""
    if mx.default_device() != mx.Device(mx.cpu):
        return np.asarray(mx.minimum(mx.exp(values - mx.logsumexp(scored, axis=-1, keepdims=True)), 1.0))
    # On a CPU, MLX computes exponentials one by one; numpy has vector code and reads the same memory.
    mx.eval(scored, values)
    rows, best = np.asarray(scored), np.asarray(values)
    total = np.exp(rows - best[:, :1]).sum(axis=-1, keepdims=True)
    return np.minimum(np.exp(best - best[:, :1]) / total, np.float32(1.0))


def _possible(tokens: Sequence[int], chances: Sequence[float]) -> Candidates:
    """The candidates without the tokens that the filters dropped."""
    count = sum(chance > 0 for chance in chances)
    return Candidates(tokens[:count], chances[:count])


def _drawn(
    scaled: mx.array, positions: Sequence[int], sampling: Sampling, batch: Batch, noise: Noise
) -> list[Candidates]:
    """The first candidate is a sample of the draft's renormalised best tokens (Leviathan et al. 2023)."""
    ids, values = top(scaled, min(MAX_SUPPORT, scaled.shape[-1]))
    rows = mx.stack([noise.row(sampling.seed, position, NoiseStream.DRAFT) for position in positions])
    gumbel = mx.take_along_axis(rows, ids, axis=-1)
    mx.eval(ids, values, gumbel)
    best = np.asarray(values).astype(np.float64)
    chances = np.exp(best - best[:, :1])
    chances /= chances.sum(axis=-1, keepdims=True)
    proposal = _saguaro(chances, batch)
    with np.errstate(divide="ignore"):
        picks = np.argmax(np.log(proposal) + np.asarray(gumbel), axis=-1)
    return [
        _with_main(tokens, chance.tolist(), share.tolist(), int(pick), max(batch.limit, MIN_CANDIDATES))
        for tokens, chance, share, pick in zip(np.asarray(ids).tolist(), chances, proposal, picks, strict=True)
    ]


def _saguaro(chances: npt.NDArray[np.float64], batch: Batch) -> npt.NDArray[np.float64]:
    """Multiply the probabilities of each row's best `fans` tokens by the factor and renormalise. After a rejection, the
    residual then favours the tokens that the tree holds (arXiv 2603.03251, section 5)."""
    if batch.saguaro == 1.0 or not batch.fans:
        return chances
    ranks = np.arange(chances.shape[-1])
    weighted = np.where(ranks < np.array(batch.fans)[:, None], batch.saguaro, 1.0) * chances
    total = weighted.sum(axis=-1, keepdims=True)
    # With a factor of 0, nothing remains if the best tokens have all the mass: then draw without the factor.
    return np.where(total > 0, weighted / np.where(total > 0, total, 1.0), chances)


def _with_main(tokens: list[int], chances: list[float], shares: list[float], pick: int, limit: int) -> Candidates:
    """The drawn token, then the other tokens by falling probability."""
    order = [pick, *(rank for rank in range(len(tokens)) if rank != pick and chances[rank] > 0)][:limit]
    support = [rank for rank in range(len(tokens)) if shares[rank] > 0]
    return Candidates(
        [tokens[rank] for rank in order],
        [chances[rank] for rank in order],
        Support([tokens[rank] for rank in support], [shares[rank] for rank in support]),
    )


def _best_blocks(scores: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """Values and ids of the entries of the blocks with the highest maxima, ids ascending."""
    rows, width = scores.shape
    blocks = -(-width // _BLOCK)
    if 2 * count > blocks:
        return scores, mx.broadcast_to(mx.arange(width), scores.shape)
    padding = blocks * _BLOCK - width
    padded = mx.pad(scores, [(0, 0), (0, padding)], constant_values=-mx.inf) if padding else scores
    blocked = padded.reshape(rows, blocks, _BLOCK)
    best = mx.sort(mx.argpartition(-blocked.max(axis=-1), count - 1, axis=-1)[:, :count], axis=-1)[:, :, None]
    values = mx.take_along_axis(blocked, best, axis=1)
    ids = best * _BLOCK + mx.arange(_BLOCK)
    return values.reshape(rows, -1), ids.reshape(rows, -1)
