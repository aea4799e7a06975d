"""Forwards of a block drafter over blocks of a sequence, behind the context of tokens whose features were fed.

A token's keys and values depend on its own features and position alone, so a gap of lost features costs the tokens in
it and nothing else. Knows no trees and no sampling.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol, Self, TypeAlias

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import KVCache

from draft_worker.candidates.block_candidates import SelectorTables
from draft_worker.drafters.block import BlockDrafter, BlockPart, KeysValues, MarkovHead
from draft_worker.drafters.token_ends import TokenEnds
from draft_worker.short_head import HeadTokens
from protocol.contracts.drafters.description import BlockForm
from protocol.sampling.top_tokens import top


class Block(NamedTuple):
    """A block's known tokens; the last one is the anchor, at index `position`."""

    tokens: Sequence[int]
    position: int


class Choices(NamedTuple):
    """Of each row of a block, the best tokens, among which a selector chooses."""

    columns: npt.NDArray[np.int64]
    """(rows, K) of the logits, the best first."""
    logits: npt.NDArray[np.float32]
    """(rows, K), before any correction."""
    latents: npt.NDArray[np.float32]
    """(rows, rank): projections of the rows' states."""


class BlockRows(NamedTuple):
    """What a forward says of one block. Row k is about the token k + 1 behind the anchor."""

    logits: mx.array
    """(rows, head), before any correction by the token before; finite."""
    states: mx.array
    """(rows, width), behind the final norm."""
    choices: Choices | None = None
    """For a drafter with a selector."""


Asked: TypeAlias = "tuple[BlockContext, Sequence[Block]]"
"""Blocks of one sequence."""


class BlockInputs(NamedTuple):
    """The inputs of several blocks, one after the other."""

    tokens: list[int]
    positions: list[int]
    numbers: list[int]
    """The block of each input."""
    rows: list[int]
    """The inputs whose rows guess, a block's after the other's."""

    @classmethod
    def of(cls, form: BlockForm, blocks: Sequence[Block]) -> "BlockInputs":
        """Blocks are numbered from 0 on."""
        inputs = cls([], [], [], [])
        for number, block in enumerate(blocks):
            count = len(block.tokens) + form.masks
            first, end = block.position - len(block.tokens) + 1, len(inputs.tokens) + count
            inputs.rows.extend(range(end - form.rows, end))
            inputs.tokens.extend([*block.tokens, *[form.mask_token] * form.masks])
            inputs.positions.extend(range(first, first + count))
            inputs.numbers.extend([number] * count)
        return inputs


class BlockRunner(Protocol):
    """A drafter that runs."""

    form: BlockForm
    markov_head: MarkovHead | None
    selector: SelectorTables | None
    head_tokens: HeadTokens | None
    """Those of the columns of the logits; None: column c is token c."""
    architecture: str
    joint: bool
    """One forward can evaluate blocks of several sequences."""

    def open(self) -> "BlockContext":
        """The context of a new sequence."""
        ...

    def forward(self, asked: Sequence[Asked]) -> list[list[BlockRows]]:
        """Every block sees its sequence's whole context and itself. The rows of each sequence's blocks."""
        ...


class MlxBlockRunner:
    """The network and the two ends of its target."""

    joint = True

    def __init__(self, network: BlockDrafter, ends: TokenEnds, head_tokens: HeadTokens | None = None) -> None:
        """`head_tokens`: those that the columns of `ends.head` stand for."""
        self.form = network.form
        self.head_tokens = head_tokens
        self.markov_head: MarkovHead | None = None if self.form.markov is None else network.markov_head
        self.selector: SelectorTables | None = None
        if self.form.choices:
            codes = network.candidate_selector
            self.selector = SelectorTables.of(codes.predecessor_codebook, codes.successor_codebook)
        self.architecture: str = self.form.kind
        self._network = network
        self._ends = ends

    def open(self) -> "BlockContext":
        return BlockContext(BlockKv(self._network))

    def forward(self, asked: Sequence[Asked]) -> list[list[BlockRows]]:
        network, form = self._network, self.form
        inputs = BlockInputs.of(form, [block for _, blocks in asked for block in blocks])
        read_together(network, [context for context, _ in asked])
        embedded = self._ends.embed(mx.array([inputs.tokens]))
        numbers = mx.array([inputs.numbers]) if inputs.numbers[-1] else None
        states = network(embedded, mx.array([inputs.positions]), list(self._parts(asked, inputs)), numbers)
        states = states[0, mx.array(inputs.rows)]
        logits = mx.nan_to_num(network.logits(states, self._ends.head), nan=0.0)
        rows = self._rows(logits, states)
        found: list[list[BlockRows]] = []
        for _, blocks in asked:
            found.append(rows[: len(blocks)])
            del rows[: len(blocks)]
        return found

    def _parts(self, asked: Sequence[Asked], inputs: BlockInputs) -> Iterator[BlockPart]:
        form, first, begin = self.form, 0, 0
        for context, blocks in asked:
            store = context.store
            assert isinstance(store, BlockKv)
            begin, first = first, first + sum(len(block.tokens) + form.masks for block in blocks)
            at, numbers = inputs.positions[begin:first], inputs.numbers[begin:first]
            seen = self._seen(context.positions, min(at))
            known = [KeysValues(keys[:, :, seen:], values[:, :, seen:]) for keys, values in store.keys_values()]
            visible: Sequence[mx.array | None] = [None] * form.layers
            if len(blocks) > 1 or form.windows or form.is_causal(None):
                visible = self._network.visibility(
                    mx.array([context.positions[seen:]]),
                    mx.array([at]),
                    mx.array([numbers]),
                    mx.full((1, len(at)), context.end),
                )
            yield BlockPart(len(at), known, visible)

    def _seen(self, positions: Sequence[int], first: int) -> int:
        """The first of the context's columns that an input from position `first` on sees, in any layer."""
        windows = [window for window in self.form.windows if window is not None]
        if len(windows) < self.form.layers:
            return 0
        return bisect_right(positions, first - max(windows))

    def _rows(self, logits: mx.array, states: mx.array) -> list[BlockRows]:
        """Of all blocks, evaluated."""
        each, choices = (-1, self.form.rows), self.form.choices
        pairs = list(zip(mx.unflatten(logits, 0, each), mx.unflatten(states, 0, each), strict=True))
        if self.selector is None:
            mx.eval(pairs)
            return [BlockRows(*pair) for pair in pairs]
        columns, best = top(logits, min(choices, logits.shape[-1]))
        latents = self._network.candidate_selector.hidden_projection(states)
        found = [mx.unflatten(values, 0, each) for values in (columns, best, latents)]
        mx.eval(pairs, found)
        ids, values, projected = np.asarray(found[0]).astype(np.int64), _floats(found[1]), _floats(found[2])
        split = zip(pairs, ids, values, projected, strict=True)
        return [BlockRows(*pair, Choices(*choice)) for pair, *choice in split]


def _floats(values: mx.array) -> npt.NDArray[np.float32]:
    return np.array(values.astype(mx.float32))


def read_together(network: BlockDrafter, contexts: Sequence["BlockContext"]) -> None:
    """Compute the keys and values of all waiting tokens of these contexts in MLX, perhaps lazily, in one product."""
    waiting = [(context.store, fed) for context in contexts for fed in context.taken()]
    if not waiting:
        return
    new = _keys_values(network, [fed for _, fed in waiting])
    ends = np.cumsum([0, *(len(fed.rows) for _, fed in waiting)]).tolist()
    for (store, _), (begin, end) in zip(waiting, pairwise(ends), strict=True):
        assert isinstance(store, BlockKv)
        store.append([KeysValues(keys[:, :, begin:end], values[:, :, begin:end]) for keys, values in new])


def _keys_values(network: BlockDrafter, fed: Sequence["FedRows"]) -> list[KeysValues]:
    rows = mx.array(np.concatenate([each.rows for each in fed])).astype(network.norm.weight.dtype)
    context = network.encode(rows)
    # Weights may still make numbers of them that half precision can't hold.
    context = mx.nan_to_num(context, nan=0.0, posinf=0.0, neginf=0.0)
    positions = mx.array([[position for each in fed for position in range(each.first, each.end)]])
    return network.keys_values(context[None], positions)


_RIDERS = 32
"""At most this many fed tokens are read along with the next blocks."""


class ContextStore(Protocol):
    """The keys and values of every layer, of tokens in the order in which they were added."""

    def add(self, fed: "FedRows", tokens: Sequence[int]) -> None:
        """Add the tokens with these features, perhaps lazily. `tokens`: all that are committed."""
        ...

    def compute(self) -> None:
        """Compute what was added."""
        ...

    def keep(self, count: int) -> None:
        """Drop the tokens behind the first `count`."""
        ...

    def copy(self, count: int) -> Self:
        """Another store with the first `count` tokens."""
        ...

    @property
    def memory(self) -> int:
        """Bytes of keys and values."""
        ...


class BlockContext:
    """Grows as features are fed, and shrinks with the committed prefix."""

    def __init__(self, store: ContextStore) -> None:
        self.store = store
        self.positions: list[int] = []
        """Indices of the tokens in the store, ascending."""
        self.tokens: Sequence[int] = ()
        """All committed tokens: the list of the sequence itself."""
        self._waiting: list[FedRows] = []

    @property
    def end(self) -> int:
        """Index behind the last token that was fed."""
        return self._waiting[-1].end if self._waiting else self.positions[-1] + 1 if self.positions else 0

    def feed(self, first: int, rows: "Rows") -> None:
        """Features of the tokens from index `first` on; those that were fed already are left out."""
        fed = FedRows(first, rows).part(self.end, first + len(rows))
        if len(fed.rows):
            self._waiting.append(fed)

    @property
    def unread(self) -> bool:
        """Whether more tokens wait than may ride along with blocks."""
        return sum(len(fed.rows) for fed in self._waiting) > _RIDERS

    def read(self, most: int) -> int:
        """Compute the keys and values of at most `most` waiting tokens. Returns their number."""
        left = most
        while self._waiting and left > 0:
            fed = self._waiting.pop(0)
            now, later = fed.part(fed.first, fed.first + left), fed.part(fed.first + left, fed.end)
            if len(later.rows):
                self._waiting.insert(0, later)
            left -= len(now.rows)
            self._append(now)
        self.store.compute()
        return most - left

    def read_all(self) -> None:
        """The same for all waiting tokens, perhaps lazily."""
        for fed in self.taken():
            self.store.add(fed, self.tokens)

    def taken(self) -> "list[FedRows]":
        """The waiting tokens, whose keys and values the caller adds to the store now."""
        taken, self._waiting = self._waiting, []
        self.positions += [position for fed in taken for position in range(fed.first, fed.end)]
        return taken

    def truncate(self, length: int) -> None:
        """Keep the tokens before index `length`."""
        kept = bisect_left(self.positions, length)
        self.store.keep(kept)
        del self.positions[kept:]
        parts = [fed.part(0, length) for fed in self._waiting]
        self._waiting = [fed for fed in parts if len(fed.rows)]

    def copy(self, length: int) -> "BlockContext":
        """The context of another sequence with the same first `length` tokens."""
        kept = bisect_left(self.positions, length)
        other = BlockContext(self.store.copy(kept))
        other.positions = self.positions[:kept]
        other._waiting = list(self._waiting)
        other.truncate(length)
        return other

    def _append(self, fed: "FedRows") -> None:
        self.store.add(fed, self.tokens)
        self.positions += range(fed.first, fed.end)


class BlockKv:
    """A `ContextStore`."""

    def __init__(self, network: BlockDrafter) -> None:
        self._network = network
        self._caches = [KVCache() for _ in network.layers]

    def add(self, fed: "FedRows", tokens: Sequence[int]) -> None:
        self.append(_keys_values(self._network, [fed]))

    def append(self, new: Sequence[KeysValues]) -> None:
        """Of every layer."""
        for cache, each in zip(self._caches, new, strict=True):
            cache.update_and_fetch(each.keys, each.values)

    def compute(self) -> None:
        mx.eval(self.keys_values())

    def keep(self, count: int) -> None:
        for cache in self._caches:
            cache.trim(cache.offset - count)

    def copy(self, count: int) -> "BlockKv":
        other = BlockKv(self._network)
        for stored, cache in zip(self._stored(count) if count else (), other._caches, strict=False):
            cache.update_and_fetch(stored.keys, stored.values)
        return other

    @property
    def memory(self) -> int:
        return sum(cache.nbytes for cache in self._caches)

    def keys_values(self) -> Sequence[KeysValues]:
        """Of every layer, (1, kv heads, S, head width) each."""
        count = self._caches[0].offset
        if count:
            return self._stored(count)
        form = self._network.form
        nothing = mx.zeros((1, form.kv_heads, 0, form.head_width), self._network.norm.weight.dtype)
        return [KeysValues(nothing, nothing)] * form.layers

    def _stored(self, count: int) -> list[KeysValues]:
        """Of the first `count` tokens."""
        held = ((cache.keys, cache.values) for cache in self._caches)
        return [
            KeysValues(keys[..., :count, :], values[..., :count, :])
            for keys, values in held
            if keys is not None and values is not None
        ]


Rows: TypeAlias = npt.NDArray[np.float32]


class FedRows(NamedTuple):
    """(tokens, width) features of the tokens from index `first` on."""

    first: int
    rows: Rows

    @property
    def end(self) -> int:
        return self.first + len(self.rows)

    def part(self, start: int, stop: int) -> "FedRows":
        """The rows of the tokens `start` to `stop`, as far as they are here."""
        start = min(max(start, self.first), self.end)
        stop = max(start, min(stop, self.end))
        return FedRows(start, self.rows[start - self.first : stop - self.first])
