"""What a sequence holds, taken apart into arrays that fit into files, and put together again. Knows no files."""

import io
import json
import math
import mmap
import sys
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import mlx.core as mx
import msgspec
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from numpy.typing import NDArray

from protocol.inference.device import compute
from protocol.inference.layer_cache import ROWS_TOGETHER
from protocol.inference.layer_caches.full_attention import FullAttentionCache
from protocol.inference.layer_caches.state import FoldingCache
from protocol.inference.tree_sequence import TreeSequence

CHUNK = ROWS_TOGETHER
"""Tokens whose rows one file holds."""
_PLACES = 3
"""A state of a large model takes a hundred megabytes."""
_ELEMENTS = {
    mx.float32: "F32",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.uint32: "U32",
    mx.int32: "I32",
    mx.uint8: "U8",
    mx.int8: "I8",
    mx.uint16: "U16",
    mx.int16: "I16",
    mx.uint64: "U64",
    mx.int64: "I64",
    mx.bool_: "BOOL",
}
"""Their names in safetensors."""
Plain: TypeAlias = bool | int | float | str | None
WindowChunk: TypeAlias = tuple[int, int]
"""A window, and the first token of a chunk of rows that it sees."""


class FilePart(NamedTuple):
    """The contents of one file."""

    arrays: dict[str, mx.array]
    plain: dict[str, Plain]
    """What a state holds beside arrays."""

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(array.nbytes for array in self.arrays.values())

    def encoded(self) -> list[bytes | memoryview]:
        """The format of safetensors, computed now, in pieces: the arrays' own memory, which is not copied."""
        compute(self.arrays)
        stated: dict[str, Any] = {"__metadata__": {"plain": msgspec.json.encode(self.plain).decode()}}
        end = 0
        for name, array in self.arrays.items():
            begin, end = end, end + array.nbytes
            stated[name] = {
                "dtype": _ELEMENTS[array.dtype],
                "shape": list(array.shape),
                "data_offsets": [begin, end],
            }
        header = json.dumps(stated).encode()
        header += b" " * (-len(header) % 8)
        return [len(header).to_bytes(8, "little") + header, *map(_bytes_of, self.arrays.values())]

    @classmethod
    def decoded(cls, content: bytes) -> "FilePart":
        """From what `encoded` gave, joined."""
        load: Any = mx.load
        arrays, metadata = load(io.BytesIO(content), format="safetensors", return_metadata=True)
        mx.eval(arrays)
        return cls(arrays, msgspec.json.decode(metadata["plain"]))


class CacheShape(NamedTuple):
    """What has to be kept of a model's sequences."""

    rows: bool
    """Rows of full attention."""
    states: bool
    """What can't be cut to any token."""
    windows: tuple[int, ...] = ()
    """Of layers, each once."""

    @classmethod
    def of(cls, sequence: TreeSequence) -> "CacheShape":
        windows = [cache.window for _, cache in _row_caches(sequence)]
        full = windows.count(None)
        return cls(full > 0, full < len(sequence.caches), tuple(sorted({window for window in windows if window})))

    def window_chunks(self, place: int) -> list[WindowChunk]:
        """Those in front of the last whole chunk's end that a forward behind so many tokens reads."""
        return [
            (window, begin)
            for window in self.windows
            for begin in range(_first_row(window, place), place - place % CHUNK, CHUNK)
        ]


class Snapshot:
    """A sequence's committed tokens as they are now, if `DiskCache.settle` is called before the sequence goes on.

    It refers to the sequence's arrays, so that taking it costs no time. A forward meanwhile copies those that it
    writes to.
    """

    def __init__(
        self, sequence: TreeSequence, first: int, places: Iterable[int], chunks: Iterable[WindowChunk] = ()
    ) -> None:
        """Of full attention, rows from token `first` on; of windows the rows in `chunks`; of all else, the states
        behind `places`, numbers of tokens of `resting_places`."""
        self._first = first
        full = _seeing(sequence, None)
        end = sequence.committed
        self._rows = _row_arrays(sequence, full, first, end) if first < end else {}
        self._windows = {
            (window, begin): _row_arrays(sequence, _seeing(sequence, window), begin, begin + CHUNK)
            for window, begin in chunks
        }
        self._states = {place: self._state(sequence, place) for place in places}

    def chunk(self, begin: int) -> FilePart:
        """The rows of full attention of the chunk that begins with this token."""
        return FilePart(self._between(begin, begin + CHUNK), {})

    def window_chunk(self, chunk: WindowChunk) -> FilePart:
        return FilePart(_own(self._windows[chunk]), {})

    def behind(self, place: int) -> FilePart:
        """All but the rows of whole chunks, behind so many tokens."""
        state, begin = self._states[place], place - place % CHUNK
        rows = {name: array for name, array in state.arrays.items() if ".state." not in name}
        return FilePart({**state.arrays, **_own(rows), **self._between(begin, place)}, state.plain)

    def _between(self, begin: int, end: int) -> dict[str, mx.array]:
        if begin == end:
            return {}
        rows = slice(begin - self._first, end - self._first)
        return _own({name: array[:, :, rows] for name, array in self._rows.items()})

    @staticmethod
    def _state(sequence: TreeSequence, place: int) -> FilePart:
        arrays: dict[str, mx.array] = {}
        plain: dict[str, Plain] = {}
        for index, cache in enumerate(sequence.caches):
            if isinstance(cache, FoldingCache):
                for path, leaf in _leaves(cache.state(place)):
                    held: dict[str, Any] = arrays if isinstance(leaf, mx.array) else plain
                    held[f"{index}.state.{path}"] = leaf
        windowed = [(index, cache) for index, cache in _row_caches(sequence) if cache.window is not None]
        begin = place - place % CHUNK
        if begin < place:
            arrays |= _row_arrays(sequence, windowed, begin, place)
        return FilePart(arrays, plain)


def resting_places(sequence: TreeSequence) -> list[int]:
    """The numbers of first tokens behind which the sequence may be taken up again, ascending: its end and the last two
    before it to which it can go back, where the next turn and other conversations branch off. Empty if some state
    can't be kept."""
    folding = [cache for cache in sequence.caches if isinstance(cache, FoldingCache)]
    places = {sequence.committed, *sequence.places}
    for cache in folding:
        places &= cache.places
    held = [place for place in sorted(places) if 0 < place <= sequence.committed and _has_windows(sequence, place)]
    found = [place for place in held if sequence.reach(place) == place][-_PLACES:]
    return found if all(_fits(cache.state(place)) for cache in folding for place in found[:1]) else []


def resume(
    sequence: TreeSequence,
    tokens: Sequence[int],
    chunks: Iterable[FilePart],
    windows: Iterable[tuple[WindowChunk, FilePart]],
    rest: FilePart,
) -> None:
    """Let the empty sequence hold these committed tokens, from their whole chunks and what was `behind` them. The
    chunks are taken one after the other, and none is held: what is read and what has been joined take the memory of
    all rows once, and that of a chunk and a layer."""
    joined = dict[str, _Joined]()
    seen = {window: _first_row(window, len(tokens)) for window in CacheShape.of(sequence).windows}
    firsts = dict[str, int]()
    for index, cache in _row_caches(sequence):
        for half in ("keys", "values"):
            firsts[f"{index}.{half}"] = seen.get(cache.window or 0, 0)
    whole = ((number * CHUNK, part) for number, part in enumerate(chunks))
    behind = (len(tokens) - len(tokens) % CHUNK, rest)
    for begin, part in chain(whole, ((begin, part) for (_, begin), part in windows), (behind,)):
        _join(joined, firsts, len(tokens), begin, part.arrays)
        # Before the next one is decoded.
        del part
    for index, cache in enumerate(sequence.caches):
        if isinstance(cache, FoldingCache):
            prefix = f"{index}.state."
            leaves = {**rest.arrays, **rest.plain}
            state = [(name.removeprefix(prefix), leaf) for name, leaf in leaves.items() if name.startswith(prefix)]
            cache.resume(len(tokens), tree_unflatten(state))
        elif isinstance(cache, FullAttentionCache) and f"{index}.keys" in joined:
            keys, values = (joined.pop(f"{index}.{half}").computed() for half in ("keys", "values"))
            cache.adopt(keys, values, first=len(tokens) - keys.shape[2])
    mx.eval([cache.arrays for cache in sequence.caches])
    sequence.resumed(tokens)


class _Joined(NamedTuple):
    """Rows that are being joined."""

    rows: NDArray[Any]
    element: mx.Dtype

    def computed(self) -> mx.array:
        array = mx.array(self.rows)
        return array.view(mx.bfloat16) if self.element == mx.bfloat16 else array


def _join(
    joined: dict[str, _Joined], firsts: dict[str, int], tokens: int, begin: int, arrays: dict[str, mx.array]
) -> None:
    """Put rows from token `begin` on among those of `tokens` tokens, of which the first one is in `firsts`."""
    for name in firsts.keys() & arrays.keys():
        rows, first = _memory_of(arrays[name]), firsts[name]
        if name not in joined:
            shape = (*rows.shape[:2], tokens - first, rows.shape[3])
            joined[name] = _Joined(_zeros(shape, rows.dtype), arrays[name].dtype)
        joined[name].rows[:, :, begin - first : begin - first + rows.shape[2]] = rows


def _zeros(shape: tuple[int, ...], element: np.dtype[Any]) -> NDArray[Any]:
    """Their memory is taken page by page, when something is written there. Huge pages would take most of it at once."""
    count = math.prod(shape)
    memory = mmap.mmap(-1, max(1, count * element.itemsize))
    if sys.platform == "linux":
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, element, count).reshape(shape)


def _memory_of(array: mx.array) -> NDArray[Any]:
    """A computed array's own memory; numpy has no bfloat16."""
    return np.asarray(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def _first_row(window: int, place: int) -> int:
    """Of the chunks that a forward behind so many tokens reads."""
    return max(0, place - window + 1) // CHUNK * CHUNK


def _has_windows(sequence: TreeSequence, place: int) -> bool:
    """Whether the sequence holds the rows of windows for the files of this place."""
    return all(
        cache.first_row(place) <= _first_row(cache.window, place)
        for _, cache in _row_caches(sequence)
        if cache.window is not None
    )


def _row_caches(sequence: TreeSequence) -> list[tuple[int, FullAttentionCache]]:
    return [(index, cache) for index, cache in enumerate(sequence.caches) if isinstance(cache, FullAttentionCache)]


def _seeing(sequence: TreeSequence, window: int | None) -> list[tuple[int, FullAttentionCache]]:
    return [(index, cache) for index, cache in _row_caches(sequence) if cache.window == window]


def _own(arrays: dict[str, mx.array]) -> dict[str, mx.array]:
    """Copies, which do not keep the arrays in memory of which they are parts; not yet computed."""
    # `mx.contiguous` would return a whole array itself, in which a later forward may write.
    return {name: mx.take(array, mx.arange(array.shape[2]), axis=2) for name, array in arrays.items()}


def _bytes_of(array: mx.array) -> memoryview:
    """Those of a computed array."""
    return _memory_of(array).reshape(-1).view(np.uint8).data


def _row_arrays(
    sequence: TreeSequence, caches: Iterable[tuple[int, FullAttentionCache]], begin: int, end: int
) -> dict[str, mx.array]:
    """Keys and values of tokens [begin, end), not yet computed. A cache of no attention has none."""
    slots = sequence.slots(begin, end)
    first, last = int(slots[0]), int(slots[-1])
    where: Any = slice(first, last + 1) if last - first == end - begin - 1 else mx.array(np.array(slots))
    found: dict[str, mx.array] = {}
    for index, cache in caches:
        if cache.arrays:
            found[f"{index}.keys"], found[f"{index}.values"] = cache.rows(where)
    return found


def _fits(state: Any) -> bool:
    """Whether a file can hold it."""
    return all(isinstance(leaf, mx.array | None | bool | int | float | str) for _, leaf in _leaves(state))


def _leaves(state: Any) -> Sequence[tuple[str, Any]]:
    found: Any = tree_flatten(state)
    return found
