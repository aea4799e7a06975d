"""From logits to scores whose argmax is the sampled token: filters, then the shared noise.

Knows nothing of trees, models or messages' flow. All arithmetic is float32 and row by row, so that a
row's result never depends on how many rows are computed with it.
"""

from collections import OrderedDict
from collections.abc import Sequence
from importlib.metadata import version

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import apply_min_p, apply_top_p

from protocol.errors import PipelineError
from protocol.messages.sampling import Sampling
from protocol.sampling.threefry import NoiseStream, gumbel, half_block, noise_bits, noise_key

_CACHE_BYTES = 64 << 20
_CACHE_ROWS = 32
"""Rows kept at least: the positions one tree spans, however large the vocabulary."""
_PROBE = (0x9E3779B9, 1234)
"""The seed and position at which MLX's generator is compared with ours."""


class Noise:
    """Standard Gumbel noise g(seed, position, stream, token), a vocabulary at a time, on MLX's device.

    The same position serves many tree nodes and rounds, so recent rows are kept.
    Raises PipelineError if this MLX lays out its random bits in another way than `protocol.sampling.threefry`.
    """

    def __init__(self, vocabulary: int, width: int | None = None) -> None:
        """`vocabulary` of the target decides the layout; rows hold the first `width` tokens of it (None: all)."""
        self.vocabulary = vocabulary
        self._width = vocabulary if width is None else width
        self._half = half_block(vocabulary)
        self._limit = max(_CACHE_ROWS, _CACHE_BYTES // (4 * vocabulary))
        self._rows: OrderedDict[tuple[int, int], mx.array] = OrderedDict()
        self._require_known_layout()

    def row(self, seed: int, position: int, stream: NoiseStream) -> mx.array:
        """(V,) float32 for the token at absolute `position`; lazily evaluated the first time."""
        key = noise_key(seed, position, stream)
        row = self._rows.pop(key, None)
        if row is None:
            row = self._fresh(key)
            if len(self._rows) >= self._limit:
                self._rows.popitem(last=False)
        self._rows[key] = row
        return row

    def _fresh(self, key: tuple[int, int]) -> mx.array:
        bits = mx.random.split(mx.array(key, dtype=mx.uint32), self._half).reshape(-1)[: self._width]
        uniform = ((bits >> 9).astype(mx.float32) + 0.5) * 2.0**-23
        return -mx.log(-mx.log(uniform))

    def _require_known_layout(self) -> None:
        tokens = np.unique(np.linspace(0, self._width - 1, 8, dtype=np.int64))
        expected = gumbel(noise_bits(*_PROBE, tokens, self.vocabulary, NoiseStream.SAMPLE))
        row = self._fresh(noise_key(*_PROBE, NoiseStream.SAMPLE))
        if not np.allclose(np.array(row[mx.array(tokens)]), expected, rtol=1e-4, atol=1e-4):
            raise PipelineError(
                f"MLX {version('mlx')} draws random bits in an order this release does not know: "
                "install the MLX version named in requirements.lock."
            )


def scores(
    logits: mx.array, positions: Sequence[int], sampling: Sampling, contexts: Sequence[Sequence[int]], noise: Noise
) -> mx.array:
    """(L, V) float32: the argmax of row i is the token sampled at absolute position `positions[i]`.

    The Gumbel-max trick: argmax(log p + g) is distributed as p. At temperature 0 the scores are the
    biased and penalised logits: no filter ever drops the most likely token.
    """
    if sampling.temperature == 0:
        return adjusted(logits, sampling, contexts)
    rows = [noise.row(sampling.seed, position, NoiseStream.SAMPLE) for position in positions]
    return filtered(logits, sampling, contexts) / sampling.temperature + mx.stack(rows)


def filtered(logits: mx.array, sampling: Sampling, contexts: Sequence[Sequence[int]]) -> mx.array:
    """(L, V) float32 logits before temperature, -inf for every token that the filters drop.

    `contexts[i]` is the whole path that row i continues; it is not read without a repetition penalty.
    Tokens tied at a filter's threshold are all kept, so that the result is a function of the row alone.
    """
    logits = adjusted(logits, sampling, contexts)
    if 0 < sampling.top_k < logits.shape[-1]:
        smallest_kept = mx.topk(logits, sampling.top_k, axis=-1).min(axis=-1, keepdims=True)
        logits = mx.where(logits < smallest_kept, -mx.inf, logits)
    if sampling.top_p < 1.0 or sampling.min_p > 0.0:
        kept = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        if sampling.top_p < 1.0:
            kept = apply_top_p(kept, sampling.top_p)
        if sampling.min_p > 0.0:
            kept = apply_min_p(kept, sampling.min_p)
        logits = mx.where(mx.isneginf(kept), -mx.inf, logits)
    return logits


def adjusted(logits: mx.array, sampling: Sampling, contexts: Sequence[Sequence[int]]) -> mx.array:
    """(L, V) float32 logits with the bias added and repeated tokens penalised, nothing dropped."""
    logits = logits.astype(mx.float32)
    biases = {token: bias for token, bias in sampling.logit_bias if token < logits.shape[-1]}
    if biases:
        logits = logits.at[:, mx.array(list(biases))].add(mx.array(list(biases.values()), dtype=mx.float32))
    if sampling.repetition_penalty != 1.0 and sampling.repetition_context > 0:
        logits = _penalised(logits, sampling, contexts)
    return logits


def _penalised(logits: mx.array, sampling: Sampling, contexts: Sequence[Sequence[int]]) -> mx.array:
    """Keskar et al. 2019 (CTRL), section 4.1, made sign-aware: a repeated token never gains."""
    repeated = np.zeros(logits.shape, dtype=bool)
    for row, context in enumerate(contexts):
        recent = np.array(context[-sampling.repetition_context :], dtype=np.int64)
        repeated[row, recent[recent < logits.shape[-1]]] = True
    penalty = sampling.repetition_penalty
    return mx.where(mx.array(repeated), mx.where(logits < 0, logits * penalty, logits / penalty), logits)
