"""Whether keys and values are the ones that were committed: a hash that grows with the tokens. Knows arrays only."""

from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray


class ArenaChecksum:
    """XXH3 over the first rows of each (layer, kv head) stripe of K and of V.

    A stripe's rows lie side by side, so nothing is gathered, and hashing takes about as long as reading
    the memory. How the rows were added makes no difference.
    """

    def __init__(self) -> None:
        self.length = 0
        """Rows hashed so far, of every stripe."""
        self._stripes: list[xxhash.xxh3_64] = []

    def extend(self, keys: NDArray[Any], values: NDArray[Any], length: int) -> int:
        """The 64-bit checksum of the first `length` rows of two (layers, kv heads, capacity, head size)
        arrays, whose first `self.length` rows were hashed before. Without rows it is 0."""
        assert length >= self.length
        if not length:
            return 0
        stripes = [stripe for half in (keys, values) for layer in half for stripe in layer]
        self._stripes = self._stripes or [xxhash.xxh3_64() for _ in stripes]
        for stripe, hashed in zip(stripes, self._stripes, strict=True):
            hashed.update(stripe[self.length : length].data)
        self.length = length
        digests = np.array([hashed.intdigest() for hashed in self._stripes], dtype=np.uint64)
        return xxhash.xxh3_64_intdigest(digests.data)
