"""Which tokens the columns of a draft's logits stand for, and candidates in a target's token numbers.

Knows no model and no tree.
"""

from collections.abc import Sequence
from functools import cached_property

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from draft_worker.candidates.ranking import propose
from draft_worker.engine import Batch
from draft_worker.head_tokens import HeadTokens
from protocol.messages.sampling import Sampling
from protocol.sampling.sampler import Noise, NoiseRows
from protocol.sampling.threefry import NoiseStream, gumbel, noise_bits
from protocol.speculation.candidates import Candidates, Support

_CACHED_ROWS = 32
"""Of noise: the positions that one tree spans."""


class Columns:
    """The columns that can be candidates beside a target of `vocabulary` tokens, of which the draft knows `shared`.

    Column c stands for token c, or for token `head[c]` if the draft's head has only some tokens. Most work on a row
    of logits is in proportion to its length, so a short head's row is only spread where token numbers matter before
    candidates are found.
    """

    def __init__(self, vocabulary: int, shared: int, head: HeadTokens | None = None) -> None:
        self.vocabulary = vocabulary
        self.shared = shared
        self.tokens = None if head is None else head[head < shared]
        """None: every token below `shared`."""
        self.count = shared if self.tokens is None else len(self.tokens)

    def lacking(self, tokens: Sequence[int]) -> list[int]:
        """Those of `tokens` that could be candidates and have no column, each once."""
        if self.tokens is None:
            return []
        return [token for token in dict.fromkeys(tokens) if token < self.shared and token not in self._known]

    def beside(self, tokens: Sequence[int]) -> "Columns":
        """These columns and, behind them, one for each of `tokens`, which lack one."""
        assert self.tokens is not None, "a whole head lacks no token"
        wider = Columns(self.vocabulary, self.shared, np.concatenate([self.tokens, np.array(tokens, np.int32)]))
        wider._noise = _NoiseBeside(self._noise, self.vocabulary, np.array(tokens))
        return wider

    def propose(self, logits: mx.array, positions: Sequence[int], sampling: Sampling, batch: Batch) -> list[Candidates]:
        """`ranking.propose` for (L, count or more) logits, with candidates as tokens."""
        logits = self.processed(logits[:, : self.count], batch)
        found = propose(logits, positions, sampling, batch._replace(processors=None), self._noise)
        return [self.named(each) for each in found]

    def processed(self, logits: mx.array, batch: Batch) -> mx.array:
        """(L, count) `logits` after the logits processors of `batch`, which know tokens and no columns."""
        if batch.processors is None:
            return logits
        if self.tokens is None:
            return batch.processors.apply(logits, batch.paths)
        return batch.processors.apply(self._spread(logits), batch.paths)[:, self._places]

    def named(self, found: Candidates) -> Candidates:
        """Candidates as tokens, from candidates as columns."""
        if self.tokens is None:
            return found
        support = found.support
        if support is not None:
            support = Support(self._names(support.tokens), support.probabilities)
        return Candidates(self._names(found.tokens), found.probabilities, support)

    def _names(self, columns: Sequence[int]) -> list[int]:
        assert self.tokens is not None, "a whole head's columns are tokens"
        return self.tokens[np.asarray(columns, np.int64)].tolist()

    def _spread(self, logits: mx.array) -> mx.array:
        """(L, shared) logits, -inf for tokens that the head lacks."""
        whole = mx.full((len(logits), self.shared), -mx.inf, logits.dtype)
        # A tenth of the time that an assignment by index takes.
        return mx.put_along_axis(whole, mx.broadcast_to(self._places, logits.shape), logits, axis=-1)

    @cached_property
    def _places(self) -> mx.array:
        assert self.tokens is not None, "only a short head's logits are spread"
        return mx.array(self.tokens)

    @cached_property
    def _known(self) -> frozenset[int]:
        return frozenset([] if self.tokens is None else self.tokens.tolist())

    @cached_property
    def _noise(self) -> NoiseRows:
        return Noise(self.vocabulary, self.shared, tokens=self.tokens)


class _NoiseBeside:
    """The rows of `noise`, which it caches, and behind them the noise of more tokens."""

    def __init__(self, noise: NoiseRows, vocabulary: int, more: npt.NDArray[np.integer]) -> None:
        self._noise, self._vocabulary, self._more = noise, vocabulary, more
        self._rows: dict[tuple[int, int, NoiseStream], mx.array] = {}
        """Those since these tokens are known: siblings share a position."""

    def row(self, seed: int, position: int, stream: NoiseStream) -> mx.array:
        key = seed, position, stream
        if key not in self._rows:
            more = mx.array(gumbel(noise_bits(seed, position, self._more, self._vocabulary, stream)))
            if len(self._rows) >= _CACHED_ROWS:
                del self._rows[next(iter(self._rows))]
            self._rows[key] = mx.concatenate([self._noise.row(seed, position, stream), more])
        return self._rows[key]
