"""On a Linux processor products read weights from 16 bits where those hold the same numbers. Knows no file.

Reading weights is most of a forward over a few tokens, and MLX multiplies in float32 alone there. The library that it
calls for products reads copies in 16 bits instead, half the memory: see `orchestrator/machine/blas/bridge.c`.
"""

import ctypes
import os
import weakref
from collections.abc import Iterator
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx import nn

from protocol.inference.observed_modules import modules_of
from protocol.paths import NARROW_VARIABLE

_Matrix: TypeAlias = npt.NDArray[np.float32]
_Copy: TypeAlias = npt.NDArray[np.uint16]
_LEAST = 1 << 16
"""Numbers of a matrix that no cache of a core holds."""


def keep_narrow(network: nn.Module) -> int:
    """Copy the network's matrices, which have been computed, for products that read 16 bits; returns the copies' bytes.

    Results are the same to the last bit. Matrices that need 32 bits are left out, and all of them where the copies
    would take more than the memory that this worker is allowed for them (`NARROW_VARIABLE`), or without that library.
    Copies stay as long as the network does.
    """
    library, allowed = ctypes.CDLL(None), int(os.environ.get(NARROW_VARIABLE, 0))
    matrices = dict(_matrices(network))
    if not hasattr(library, "bridge_narrow_weights") or 2 * sum(each.size for each in matrices.values()) > allowed:
        return 0
    kept: list[tuple[_Matrix, _Copy]] = []
    for matrix in matrices.values():
        copy = np.empty(matrix.size, np.uint16)
        if library.bridge_narrow_weights(_at(matrix), ctypes.c_int64(matrix.size), _at(copy)):
            kept.append((matrix, copy))
    # The arrays of `kept` are in memory until then, so that no other weights can have their addresses.
    weakref.finalize(network, _forget, library, kept).atexit = False
    return sum(copy.nbytes for _, copy in kept)


def _matrices(network: nn.Module) -> Iterator[tuple[int, _Matrix]]:
    """Each as MLX holds it, by its address."""
    modules: Any = modules_of(network)
    for array in _members(modules):
        if isinstance(array, mx.array) and array.ndim >= 2 and array.size >= _LEAST and array.dtype == mx.float32:
            found: Any = array
            matrix: _Matrix = np.array(found, copy=False)
            if matrix.flags.c_contiguous:
                yield matrix.ctypes.data, matrix


def _members(modules: list[dict[str, Any]]) -> Iterator[Any]:
    for module in modules:
        yield from module.values()


def _at(array: _Matrix | _Copy) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _forget(library: ctypes.CDLL, kept: list[tuple[_Matrix, _Copy]]) -> None:
    for matrix, _ in kept:
        library.bridge_forget_weights(_at(matrix))
