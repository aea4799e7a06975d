"""The arrays that Core ML was given as inputs. They live as long as the process. Knows no Core ML.

Core ML keeps the inputs of a call after the call has returned, and releases them about a second later on a queue of its
own. coremltools then drops its reference to the NumPy array without the GIL (pull requests 2827 and 2829 of
apple/coremltools, open in 2026-11). If that reference is the last one, the array is freed on that queue, and the heap
is damaged. If it is not, the count can still be changed by both threads at once, and one of the changes be lost.
"""

from collections.abc import Iterable

from draft_worker.coreml.arrays import Array

_SPARE = 1 << 14
"""References to each array. Lost changes of the count never use them all up; they take 128 KiB an array."""
_LENT: dict[int, list[Array]] = {}
"""By id; a kept array's id belongs to no other object."""


def lend(arrays: Iterable[Array]) -> None:
    """Keep these arrays for the life of the process. The caller must reuse its arrays, or memory grows."""
    for array in arrays:
        if id(array) not in _LENT:
            _LENT[id(array)] = [array] * _SPARE


def lent() -> list[Array]:
    """Every array that was lent."""
    return [references[0] for references in _LENT.values()]
