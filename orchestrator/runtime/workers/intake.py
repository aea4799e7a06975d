"""Takes in KV of a remote prefill worker and features of a remote target, into shared memory of this process.

Forms and sizes come from the target, the request and what was asked for, never from the sender. Knows no sockets. The
numbers themselves can't be checked: a machine that is admitted as a prefill worker can change the text; wrong features
cost acceptance, and no token.
"""

import logging
from dataclasses import dataclass
from itertools import count

import numpy as np
from msgspec import structs

from protocol.features.blocks import whole
from protocol.features.ring import FeatureRing
from protocol.kv.arena import Arena
from protocol.kv.arena_header import ArenaLayout, ElementType
from protocol.kv.exchange import row_bytes
from protocol.kv.segments import SegmentError
from protocol.messages.base import RequestId
from protocol.messages.features import FeatureBlock, FeatureForm, Features, Tap, Taps
from protocol.messages.kv import KvForm, KvOffer
from protocol.messages.remote import MAX_PAYLOAD, KvBlock
from protocol.messages.worker import Fault, Hello, Prefill


@dataclass(slots=True)
class _Unfinished:
    attempt: int
    arena: Arena
    rows: int = 0
    """Rows of the blocks of the current group, one block for each layer."""
    layer: int = 0
    """Layer of the next block."""


class KvIntake:
    """Holds unfinished arenas of at most `limit` bytes."""

    def __init__(self, epoch: int, limit: int) -> None:
        self._epoch = epoch
        self._limit = limit
        self.target: Hello | None = None
        """The local target that is up; its Hello determines the form of KV."""
        self._attempts = count(1)
        self._unfinished: dict[RequestId, _Unfinished] = {}
        self.dropped = 0
        """Blocks that were not requested, or not in that form."""

    def mismatch(self, worker: Hello) -> str | None:
        """Why a prefill worker's KV does not fit the target, as a sentence; None if it does."""
        target = self.target
        if target is None or target.kv is None:
            return "The target of this pipeline can't adopt keys and values: attach a draft instead."
        if worker.model_fingerprint != target.model_fingerprint:
            return (
                f"The prefill worker's model ({worker.model}) is not the target's ({target.model}), "
                "or holds KV in other bits: attach it with the same files, byte for byte, and the same --kv-bits."
            )
        if worker.kv != target.kv:
            return (
                "The prefill worker's keys and values have another form than the target's (its device has another "
                "number format): attach it from a machine of the target's kind."
            )
        if row_bytes(target.kv, _element(target.kv).size) > MAX_PAYLOAD:
            return "One token of this target takes more than a block may hold: attach a draft instead."
        return None

    def open(self, message: Prefill) -> Prefill | Fault:
        """Create an arena for a prompt's KV; returns the Prefill to send, or why there is no arena."""
        self.discard(message.request)
        assert self.target is not None
        assert self.target.kv is not None
        form = self.target.kv
        layout = ArenaLayout(form.layers, form.kv_heads, len(message.tokens), form.head_size, _element(form))
        if (
            layout.segment_bytes + sum(one.arena.layout.segment_bytes for one in self._unfinished.values())
            > self._limit
        ):
            return Fault("refused", "This prompt's KV is larger than the memory for arenas.", message.request)
        try:
            arena = Arena.create(layout, fingerprint=self.target.model_fingerprint, epoch=self._epoch)
        except SegmentError as error:
            return Fault("refused", str(error), message.request)
        attempt = next(self._attempts)
        self._unfinished[message.request] = _Unfinished(attempt, arena)
        return structs.replace(message, attempt=attempt)

    def add(self, block: KvBlock, payload: bytes) -> KvOffer | Fault | None:
        """Write a block into its arena; returns the offer after the last block.

        A block that was not requested is dropped. A block out of order ends its prompt: the missing one never comes.
        """
        unfinished = self._unfinished.get(block.request)
        if unfinished is None or unfinished.attempt != block.attempt:
            self.dropped += 1
            return None
        if not _fits(unfinished, block, payload):
            self.dropped += 1
            self.discard(block.request)
            return Fault("refused", "A block of KV was not the next one.", block.request)
        arena = unfinished.arena
        layers, heads, _, size = arena.body.shape
        rows = np.frombuffer(payload, arena.layout.dtype.numpy_name).reshape(heads, block.rows, size)
        arena.body[block.layer, :, block.begin : block.begin + block.rows] = rows
        unfinished.rows, unfinished.layer = block.rows, (block.layer + 1) % layers
        if unfinished.layer == 0:
            arena.commit(block.begin + block.rows)
        return self._finish(block.request) if arena.committed == arena.layout.capacity else None

    def discard(self, sequence: RequestId) -> None:
        """Remove a sequence's unfinished arena, if there is one."""
        unfinished = self._unfinished.pop(sequence, None)
        if unfinished is not None:
            unfinished.arena.close()
            unfinished.arena.unlink()

    def clear(self) -> None:
        """Remove all unfinished arenas: the prefill worker is gone."""
        for sequence in list(self._unfinished):
            self.discard(sequence)

    def _finish(self, sequence: RequestId) -> KvOffer:
        """Hand the arena over: from now on the state machine releases it."""
        arena = self._unfinished.pop(sequence).arena
        tokens, size = arena.committed, arena.layout.segment_bytes
        arena.close()
        return KvOffer(sequence, arena.name, tokens, size, 0.0)


def _fits(unfinished: _Unfinished, block: KvBlock, payload: bytes) -> bool:
    """Whether it is the next block, and its payload has the right size."""
    layout = unfinished.arena.layout
    rows = unfinished.rows if unfinished.layer else block.rows
    return (
        (block.begin, block.layer, block.rows) == (unfinished.arena.committed, unfinished.layer, rows)
        and block.begin + block.rows <= layout.capacity
        and len(payload) == block.rows * layout.kv_heads * layout.head_size * layout.dtype.size
    )


def _element(form: KvForm) -> ElementType:
    return ElementType(form.element)


log = logging.getLogger(__name__)


class FeatureIntake:
    """One ring for each sequence that the target serves, from its first block on."""

    def __init__(self, taps: Taps, epoch: int, fingerprint: str) -> None:
        """`taps`: what the target can record. `fingerprint`: of its weights."""
        self._taps = taps
        self._epoch = epoch
        self._fingerprint = fingerprint
        self._form: FeatureForm | None = None
        """What it was told to record."""
        self._rings: dict[RequestId, FeatureRing | None] = {}
        """None until a block comes."""
        self._warned = False
        self.dropped = 0
        """Blocks that are damaged, that nobody asked for, or that were overtaken."""

    def tap(self, tap: Tap) -> None:
        """The target is told to record these outputs, in new rings."""
        for sequence in list(self._rings):
            self._renew(sequence)
        self._form = FeatureForm(tap.outputs, self._taps.width) if tap.outputs else None

    def begin(self, sequence: RequestId) -> None:
        """The target is told to serve this sequence, perhaps again."""
        self._renew(sequence)

    def end(self, sequence: RequestId) -> None:
        """The target serves it no longer."""
        self._renew(sequence)
        self._rings.pop(sequence, None)

    def close(self) -> None:
        """The target is gone."""
        for sequence in list(self._rings):
            self.end(sequence)

    def add(self, block: FeatureBlock, payload: bytes) -> Features | None:
        """Write a block; returns what a target of this machine would say of it. Blocks come in order, perhaps with
        gaps."""
        asked = self._form == block.form and block.request in self._rings
        rows = whole(block, payload) if asked else None
        ring = None if rows is None else self._ring_for(block)
        fits = ring is not None and (ring.form, ring.layout.element) == (block.form, block.element)
        if rows is None or ring is None or not fits or block.first < ring.available.stop:
            self.dropped += 1
            return None
        ring.write(block.first, rows)
        first = max(block.first, ring.available.start)
        return Features(block.request, block.round, ring.name, first, block.first + block.rows - first)

    def _ring_for(self, block: FeatureBlock) -> FeatureRing | None:
        """The ring of the block's sequence, made for its form if there is none; None without shared memory."""
        ring = self._rings[block.request]
        if ring is None:
            element = ElementType(block.element)
            try:
                ring = FeatureRing.create(block.form, element, fingerprint=self._fingerprint, epoch=self._epoch)
            except SegmentError as error:
                if not self._warned:
                    log.warning("drafts get no features of the target: %s", error)
                    self._warned = True
                return None
            self._rings[block.request] = ring
        return ring

    def _renew(self, sequence: RequestId) -> None:
        """The sequence has no ring, until a block comes."""
        ring = self._rings.get(sequence)
        if ring is not None:
            ring.unlink()
            ring.close()
        self._rings[sequence] = None
