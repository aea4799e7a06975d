"""A target sequence's KV, which outlives the sequence in the prefix cache. Knows no tokens."""

from typing import NamedTuple

from protocol.inference.tree_sequence import TreeSequence
from target_worker.kv.checkpoint import KvCheckpoint


class TargetKv(NamedTuple):
    """In this process's memory, and in shared memory if it is saved there."""

    cache: TreeSequence
    checkpoint: KvCheckpoint | None

    @property
    def memory(self) -> int:
        return self.cache.memory

    @property
    def copyable(self) -> bool:
        return self.cache.copyable

    def first(self, length: int, exclusive: bool) -> TreeSequence:
        """The KV of the first `length` tokens: this one itself if the caller has it exclusively, or a copy."""
        if not exclusive:
            return self.cache.copy(length)
        self.cache.truncate(length)
        return self.cache

    def close(self) -> None:
        """Save nothing more."""
        if self.checkpoint is not None:
            self.checkpoint.close()
