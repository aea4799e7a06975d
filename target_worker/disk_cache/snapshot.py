"""What a sequence holds, taken apart into arrays that fit into files, and put together again. Knows no files."""

import io
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import mlx.core as mx
import msgspec
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from protocol.inference.device import compute
from protocol.inference.layer_cache import FoldingCache, LayerCache, RowCache
from protocol.inference.tree_sequence import TreeSequence

CHUNK = 256
"""Tokens whose rows one file holds."""
_PLACES = 3
"""A state of a large model takes a hundred megabytes."""
Plain: TypeAlias = bool | int | float | str | None


class FilePart(NamedTuple):
    """The contents of one file."""

    arrays: dict[str, mx.array]
    plain: dict[str, Plain]
    """What a state holds beside arrays."""

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(array.nbytes for array in self.arrays.values())

    def encoded(self, room: int) -> memoryview:
        """So many bytes for the caller, and the format of safetensors, computed now. A large state would otherwise be
        copied for what stands in front."""
        buffer = io.BytesIO()
        buffer.write(bytes(room))
        save: Any = mx.save_safetensors
        save(buffer, self.arrays, {"plain": msgspec.json.encode(self.plain).decode()})
        return buffer.getbuffer()

    @classmethod
    def decoded(cls, content: bytes) -> "FilePart":
        """The inverse of `encoded`."""
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

    @classmethod
    def of(cls, sequence: TreeSequence) -> "CacheShape":
        full = [_is_full(cache) for cache in sequence.caches]
        return cls(any(full), not all(full))


class Snapshot:
    """A sequence's committed tokens as they are now: later forwards do not change it.

    It refers to the sequence's arrays, so that taking it costs no time. A forward meanwhile copies those that it
    writes to.
    """

    def __init__(self, sequence: TreeSequence, first: int, places: Iterable[int]) -> None:
        """Of full attention, rows from token `first` on; of all else, the states behind `places`, numbers of tokens of
        `resting_places`."""
        self._first = first
        caches = list(enumerate(sequence.caches))
        full = [(index, cache) for index, cache in caches if isinstance(cache, RowCache) and _is_full(cache)]
        end = sequence.committed
        self._rows = _row_arrays(sequence, full, first, end) if first < end else {}
        self._states = {place: self._state(sequence, place) for place in places}

    def chunk(self, begin: int) -> FilePart:
        """The rows of the chunk that begins with this token."""
        return FilePart(self._between(begin, begin + CHUNK), {})

    def behind(self, place: int) -> FilePart:
        """All but the rows of whole chunks, behind so many tokens."""
        state, begin = self._states[place], place - place % CHUNK
        return FilePart({**state.arrays, **self._between(begin, place)}, state.plain)

    def _between(self, begin: int, end: int) -> dict[str, mx.array]:
        if begin == end:
            return {}
        rows = slice(begin - self._first, end - self._first)
        return {name: mx.contiguous(array[:, :, rows]) for name, array in self._rows.items()}

    @staticmethod
    def _state(sequence: TreeSequence, place: int) -> FilePart:
        arrays: dict[str, mx.array] = {}
        plain: dict[str, Plain] = {}
        for index, cache in enumerate(sequence.caches):
            if isinstance(cache, FoldingCache):
                for path, leaf in _leaves(cache.state(place)):
                    held: dict[str, Any] = arrays if isinstance(leaf, mx.array) else plain
                    held[f"{index}.state.{path}"] = leaf
            elif isinstance(cache, RowCache) and cache.window is not None:
                begin = max(0, place - cache.window + 1)
                arrays |= _row_arrays(sequence, [(index, cache)], begin, place)
        return FilePart(arrays, plain)


def resting_places(sequence: TreeSequence, prompt: int) -> list[int]:
    """The numbers of first tokens behind which the sequence may be taken up again, ascending: its end and the last two
    states before it, where the next turn and other conversations branch off, or with windows alone the end of the
    prompt and of all. Empty if some state can't be kept."""
    folding = [cache for cache in sequence.caches if isinstance(cache, FoldingCache)]
    places = {sequence.committed, prompt}
    if folding:
        places = set.intersection(*(cache.places for cache in folding))
    found = sorted(place for place in places if 0 < place <= sequence.committed)
    found = [place for place in found if sequence.reach(place) == place][-_PLACES:]
    return found if all(_fits(cache.state(place)) for cache in folding for place in found[:1]) else []


def resume(sequence: TreeSequence, tokens: Sequence[int], chunks: Iterable[FilePart], rest: FilePart) -> None:
    """Let the empty sequence hold these committed tokens, from their whole chunks and what was `behind` them. The
    chunks are taken one after the other, and none is held."""
    full = {
        f"{index}.{half}"
        for index, cache in enumerate(sequence.caches)
        if _is_full(cache)
        for half in ("keys", "values")
    }
    joined, end = dict[str, mx.array](), 0
    for part in chain(chunks, (rest,)):
        begin = end
        for name in full & part.arrays.keys():
            rows = part.arrays[name]
            end = begin + rows.shape[2]
            if name not in joined:
                joined[name] = mx.zeros((*rows.shape[:2], len(tokens), rows.shape[3]), rows.dtype)
            joined[name][:, :, begin:end] = rows
        compute(joined)
    for index, cache in enumerate(sequence.caches):
        if isinstance(cache, FoldingCache):
            prefix = f"{index}.state."
            leaves = {**rest.arrays, **rest.plain}
            state = [(name.removeprefix(prefix), leaf) for name, leaf in leaves.items() if name.startswith(prefix)]
            cache.resume(len(tokens), tree_unflatten(state))
        elif isinstance(cache, RowCache):
            held = joined if _is_full(cache) else rest.arrays
            if f"{index}.keys" in held:
                keys, values = held[f"{index}.keys"], held[f"{index}.values"]
                cache.adopt(keys, values, first=len(tokens) - keys.shape[2])
    mx.eval([cache.arrays for cache in sequence.caches])
    sequence.resumed(tokens)


def _is_full(cache: LayerCache) -> bool:
    return isinstance(cache, RowCache) and cache.window is None


def _row_arrays(
    sequence: TreeSequence, caches: Iterable[tuple[int, RowCache]], begin: int, end: int
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
