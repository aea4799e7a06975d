"""Keys and values of a block drafter's context in MLX."""

from collections.abc import Sequence

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from draft_worker.drafters.block import BlockDrafter, KeysValues
from draft_worker.drafters.fed_rows import FedRows


class BlockKv:
    """A `ContextStore`."""

    def __init__(self, network: BlockDrafter) -> None:
        self._network = network
        self._caches = [KVCache() for _ in network.layers]

    def add(self, fed: FedRows) -> None:
        features = mx.array(fed.rows)[None].astype(self._network.norm.weight.dtype)
        # Weights may still make numbers of them that half precision can't hold.
        context = mx.nan_to_num(self._network.encode(features), nan=0.0, posinf=0.0, neginf=0.0)
        positions = mx.array([list(range(fed.first, fed.end))])
        for cache, new in zip(self._caches, self._network.keys_values(context, positions), strict=True):
            cache.update_and_fetch(new.keys, new.values)

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

    def close(self) -> None:
        """The arrays are freed with this object."""

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
