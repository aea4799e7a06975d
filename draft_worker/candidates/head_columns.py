"""Which tokens the columns of a draft's logits stand for, and candidates in a target's token numbers.

Tokens of a context join a short head: what its text has, the target often writes again. Knows no network and no tree.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from draft_worker.candidates.ranking import Followers, mixed, propose
from draft_worker.engine_interface import Batch, Engine
from draft_worker.short_head import HeadTokens, ShortHead
from protocol.messages.sampling import Sampling
from protocol.sampling.grammar import Grammars
from protocol.sampling.gumbel_noise import Noise, NoiseRows
from protocol.sampling.threefry import gumbel, noise_bits
from protocol.speculation.token_tree import Candidates

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
        wider.noise = _NoiseBeside(self.noise, self.vocabulary, np.array(tokens))
        wider._known = {**self._known, **{token: place for place, token in enumerate(tokens, start=self.count)}}
        return wider

    def propose(self, logits: mx.array, positions: Sequence[int], sampling: Sampling, batch: Batch) -> list[Candidates]:
        """`ranking.propose` for (L, count or more) logits, mixed with the batch's followers. Candidates are tokens."""
        logits = logits[:, : self.count]
        if batch.followers:
            logits = mixed(logits, self.followers(batch), sampling.temperature)
        logits = self.processed(logits, batch)
        found = propose(logits, positions, sampling, batch._replace(processors=None), self.noise)
        return [self.named(each) for each in found]

    def followers(self, batch: Batch) -> Followers:
        """Those of the batch that have a column, as columns."""
        return [
            [(column, probability) for token, probability in found if (column := self._column(token)) is not None]
            for found in batch.followers
        ]

    def _column(self, token: int) -> int | None:
        if self.tokens is None:
            return token if token < self.shared else None
        return self._known.get(token)

    def processed(self, logits: mx.array, batch: Batch) -> mx.array:
        """(L, count) `logits` after the logits processors of `batch`, which know tokens and no columns."""
        if batch.processors is None:
            return logits
        if self.tokens is None or not batch.processors.reads_tokens:
            return batch.processors.apply(logits, batch.paths)
        return batch.processors.apply(self._spread(logits), batch.paths)[:, self._places]

    def named(self, found: Candidates) -> Candidates:
        """Candidates as tokens, from candidates as columns."""
        if self.tokens is None:
            return found
        return Candidates(self.ids(np.asarray(found.tokens, np.int64)).tolist(), found.probabilities)

    def ids(self, columns: npt.NDArray[np.integer]) -> npt.NDArray[np.integer]:
        """The tokens of `columns`."""
        return columns if self.tokens is None else self.tokens[columns]

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
    def _known(self) -> Mapping[int, int]:
        """The column of each token."""
        return {} if self.tokens is None else {token: column for column, token in enumerate(self.tokens.tolist())}

    @cached_property
    def noise(self) -> NoiseRows:
        """Of the columns."""
        return Noise(self.vocabulary, self.shared, tokens=self.tokens)


class _NoiseBeside:
    """The rows of `noise`, which it caches, and behind them the noise of more tokens."""

    def __init__(self, noise: NoiseRows, vocabulary: int, more: npt.NDArray[np.integer]) -> None:
        self._noise, self._vocabulary, self._more = noise, vocabulary, more
        self._rows: dict[tuple[int, int], mx.array] = {}
        """Those since these tokens are known: siblings share a position."""

    def row(self, seed: int, position: int) -> mx.array:
        key = seed, position
        if key not in self._rows:
            more = mx.array(gumbel(noise_bits(seed, position, self._more, self._vocabulary)))
            if len(self._rows) >= _CACHED_ROWS:
                del self._rows[next(iter(self._rows))]
            self._rows[key] = mx.concatenate([self._noise.row(seed, position), more])
        return self._rows[key]


_MOST = 256
"""Tokens of a sequence that join; the latest ones stay."""


class ContextColumns:
    """The columns of one sequence: those of its draft's head, and behind them those of tokens that it has read and the
    head lacks."""

    def __init__(self, head: Columns, *, widens: bool) -> None:
        """`widens`: the head can compute any token's logits."""
        self.head = head
        self.now = head
        """The columns of the next forward."""
        self.tokens: Sequence[int] = ()
        """Those that the head lacks."""
        self._widens = widens

    def see(self, tokens: Sequence[int]) -> None:
        """The sequence reads these tokens."""
        if self._widens and (more := [each for each in self.head.lacking(tokens) if each not in self.tokens]):
            self.tokens = (*self.tokens, *more)[-_MOST:]
            self.now = self.head.beside(self.tokens)

    def own(self, logits: mx.array, more: Mapping[int, int]) -> mx.array:
        """The columns of this sequence, from those of a head that `widened` made wider by `more`."""
        width = logits.shape[-1] - len(more)
        if not more or (self.head.count == width and list(self.tokens) == list(more)):
            return logits
        known = logits[:, : self.head.count]
        if not self.tokens:
            return known
        return mx.concatenate([known, logits[:, mx.array([width + more[token] for token in self.tokens])]], axis=-1)


def widened(head: ShortHead | None, sequences: Iterable[ContextColumns]) -> Mapping[int, int]:
    """Let the next forward's head compute what all of `sequences` have read: each token with its place behind the
    head's own. None for a head that knows no other tokens."""
    if head is None or not head.widens:
        return {}
    more = dict.fromkeys(token for sequence in sequences for token in sequence.tokens)
    head.widen(list(more))
    return {token: place for place, token in enumerate(more)}


class ColumnsEngine(Engine):
    """A subclass calls `set_up_columns` while it is made."""

    def set_up_columns(self, folder: Path, vocabulary: int, head: HeadTokens | None) -> None:
        """`folder` holds the tokenizer. `head`: the tokens of the draft's head if it has only some."""
        self.vocabulary = vocabulary
        self._head = head
        self.grammars = Grammars(folder, vocabulary)
        self._columns: dict[int, Columns] = {}
        """By the size of the target's vocabulary."""

    def columns(self, vocabulary: int) -> Columns:
        """Beside a target of so many tokens."""
        if vocabulary not in self._columns:
            self._columns[vocabulary] = Columns(vocabulary, min(self.vocabulary, vocabulary), self._head)
        return self._columns[vocabulary]
