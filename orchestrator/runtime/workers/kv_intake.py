"""KV that a prefill worker of another machine sends, put together in arenas of our own making.

Sizes come from our own target and from what was asked, never from the sender. Knows no sockets. What it
can't know is whether the numbers are right: a guest that is let in as a prefill worker is trusted with the text.
"""

from dataclasses import dataclass
from itertools import count

import numpy as np
from msgspec import structs

from protocol.kv.arena import Arena
from protocol.kv.arena_header import ArenaLayout, ElementType
from protocol.kv.blocks import row_bytes
from protocol.kv.segments import SegmentError
from protocol.messages.base import SequenceId
from protocol.messages.remote import MAX_PAYLOAD, KvBlock
from protocol.messages.worker import Fault, Hello, KvForm, KvOffer, Prefill


@dataclass(slots=True)
class _Unfinished:
    attempt: int
    arena: Arena
    rows: int = 0
    """Of the blocks that are under way."""
    layer: int = 0
    """That comes next."""


class KvIntake:
    """At most `limit` bytes of unfinished arenas."""

    def __init__(self, epoch: int, limit: int) -> None:
        self._epoch = epoch
        self._limit = limit
        self._target: Hello | None = None
        self._questions = count(1)
        self._open: dict[SequenceId, _Unfinished] = {}
        self.dropped = 0
        """Blocks that nobody had asked for, or not so."""

    def serve(self, target: Hello) -> None:
        """Our own target is up: what it says of its KV counts."""
        self._target = target

    def mismatch(self, worker: Hello) -> str | None:
        """Why a prefill worker can't read for our target, as a sentence, or None."""
        target = self._target
        if target is None or target.kv is None:
            return "The target of this pipeline takes no keys and values from others: attach a draft instead."
        if worker.model_fingerprint != target.model_fingerprint:
            return (
                f"The prefill worker's model ({worker.model}) is not the target's ({target.model}): "
                "give --target the same files, byte for byte."
            )
        if worker.kv != target.kv:
            return (
                "The prefill worker computes keys and values of another kind than the target (its device has another "
                "number format): attach it from a machine of the target's kind."
            )
        if row_bytes(target.kv, _element(target.kv).size) > MAX_PAYLOAD:
            return "One token of this target takes more than a block may have: attach a draft instead."
        return None

    def ask(self, message: Prefill) -> Prefill | Fault:
        """The attempt as it goes to the worker, and an arena for the answer; or why it can't be asked."""
        self.end(message.sequence)
        assert self._target is not None
        assert self._target.kv is not None
        form = self._target.kv
        layout = ArenaLayout(form.layers, form.kv_heads, len(message.tokens), form.head_size, _element(form))
        if layout.segment_bytes + sum(one.arena.layout.segment_bytes for one in self._open.values()) > self._limit:
            return Fault("refused", "This prompt's KV is larger than --arena-memory.", message.sequence)
        try:
            arena = Arena.create(layout, fingerprint=self._target.model_fingerprint, epoch=self._epoch)
        except SegmentError as error:
            return Fault("refused", str(error), message.sequence)
        attempt = next(self._questions)
        self._open[message.sequence] = _Unfinished(attempt, arena)
        return structs.replace(message, attempt=attempt)

    def take(self, block: KvBlock, payload: bytes) -> KvOffer | Fault | None:
        """Put a block in its place; the offer when it was the last one. A block that is none of those asked for is
        dropped, and one out of order ends its prompt: what is missing would never come."""
        unfinished = self._open.get(block.sequence)
        if unfinished is None or unfinished.attempt != block.attempt:
            self.dropped += 1
            return None
        if not _fits(unfinished, block, payload):
            self.dropped += 1
            self.end(block.sequence)
            return Fault("refused", "A block of KV was not the next one.", block.sequence)
        arena = unfinished.arena
        layers, heads, _, size = arena.body.shape
        rows = np.frombuffer(payload, arena.layout.dtype.numpy_name).reshape(heads, block.rows, size)
        arena.body[block.layer, :, block.begin : block.begin + block.rows] = rows
        unfinished.rows, unfinished.layer = block.rows, (block.layer + 1) % layers
        if unfinished.layer == 0:
            arena.commit(block.begin + block.rows)
        return self._finish(block.sequence) if arena.committed == arena.layout.capacity else None

    def end(self, sequence: SequenceId) -> None:
        """Nobody waits for this one any more."""
        unfinished = self._open.pop(sequence, None)
        if unfinished is not None:
            unfinished.arena.close()
            unfinished.arena.unlink()

    def clear(self) -> None:
        """Whoever was asked is gone."""
        for sequence in list(self._open):
            self.end(sequence)

    def _finish(self, sequence: SequenceId) -> KvOffer:
        """From here on the arena is the state machine's to release."""
        arena = self._open.pop(sequence).arena
        tokens, size = arena.committed, arena.layout.segment_bytes
        arena.close()
        return KvOffer(sequence, arena.name, tokens, size, 0.0)


def _fits(unfinished: _Unfinished, block: KvBlock, payload: bytes) -> bool:
    """Whether it is the next block, and as long as it says."""
    layout = unfinished.arena.layout
    rows = unfinished.rows if unfinished.layer else block.rows
    return (
        (block.begin, block.layer, block.rows) == (unfinished.arena.committed, unfinished.layer, rows)
        and block.begin + block.rows <= layout.capacity
        and len(payload) == block.rows * layout.kv_heads * layout.head_size * layout.dtype.size
    )


def _element(form: KvForm) -> ElementType:
    return ElementType(form.element)
