"""Reads prompts in the target's stead and hands their KV on. Pure over an engine; knows no sockets.

The engine runs the target's own model, or a conversion of it, on a device that the target does not use.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec import structs

from draft_worker.engine import LoadedModel, introduction
from draft_worker.prefill.outlet import OpenOutlet, Outlet
from protocol.kv.arena import LayerRows
from protocol.kv.arena_header import ArenaLayout
from protocol.kv.blocks import kv_form
from protocol.kv.segments import SegmentError
from protocol.messages.base import SequenceId
from protocol.messages.worker import Fault, Hello, Prefill, Stop, ToWorker
from protocol.worker.interface import WorkerReply


class PrefillSequence(Protocol):
    """One prompt."""

    def prefill(self, tokens: Sequence[int]) -> tuple[LayerRows, LayerRows]:
        """Evaluate tokens behind those of former calls; their keys and values, which may be views that
        hold until the next call."""
        ...


class PrefillEngine(LoadedModel, Protocol):
    """The target's model, or a conversion of it."""

    @property
    def layout(self) -> ArenaLayout: ...

    def open(self) -> PrefillSequence: ...


@dataclass(slots=True)
class _Reading:
    asked: Prefill
    sequence: PrefillSequence
    outlet: Outlet
    read: int = 0
    seconds: float = 0.0


class PrefillWorker:
    """Reads one prompt after the other, a chunk at a time, so that others' messages are heard in between."""

    def __init__(
        self,
        engine: PrefillEngine,
        open_outlet: OpenOutlet,
        clock: Callable[[], float],
        chunk: int,
        fingerprint: str = "",
    ) -> None:
        """`clock` in seconds, monotonic; `chunk` bounds the tokens of one call of the engine; `fingerprint`: of the
        target's model."""
        self._engine = engine
        self._open_outlet = open_outlet
        self._fingerprint = fingerprint
        self._clock = clock
        self._chunk = chunk
        self._readings: dict[SequenceId, _Reading] = {}

    def hello(self) -> Hello:
        plain = introduction("prefill", self._engine)
        return structs.replace(plain, kv=kv_form(self._engine.layout), model_fingerprint=self._fingerprint)

    def handle(self, message: ToWorker) -> Iterable[WorkerReply]:
        match message:
            case Prefill():
                return self._begin(message)
            case Stop(sequence):
                self._forget(sequence)
        return ()

    @property
    def has_work(self) -> bool:
        return bool(self._readings)

    def work(self) -> Iterator[WorkerReply]:
        """Read one chunk of the prompt that has waited longest; offer the whole when it is read."""
        reading = next(iter(self._readings.values()))
        began = self._clock()
        tokens = reading.asked.tokens[reading.read : reading.read + self._chunk]
        yield from reading.outlet.put(reading.read, *reading.sequence.prefill(tokens))
        reading.read += len(tokens)
        reading.seconds += self._clock() - began
        if reading.read == len(reading.asked.tokens):
            del self._readings[reading.asked.sequence]
            yield from reading.outlet.done(reading.seconds)

    def _begin(self, asked: Prefill) -> Iterator[WorkerReply]:
        held = self._readings.get(asked.sequence)
        if held is not None and held.asked == asked:
            return
        self._forget(asked.sequence)
        if len(asked.tokens) > self._engine.context or max(asked.tokens) >= self._engine.vocabulary:
            yield Fault("refused", "The prompt is beyond what the prefill engine knows.", asked.sequence)
            return
        try:
            outlet = self._open_outlet(asked)
        except SegmentError as error:
            yield Fault("refused", str(error), asked.sequence)
            return
        self._readings[asked.sequence] = _Reading(asked, self._engine.open(), outlet)

    def _forget(self, sequence: SequenceId) -> None:
        reading = self._readings.pop(sequence, None)
        if reading is not None:
            reading.outlet.drop()
