"""Reads prompts in the target's stead and leaves their KV in shared memory. Pure over an engine; knows no sockets.

The engine runs the target's own model, or a conversion of it, on a device that the target does not use.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from draft_worker.loaded_model import LoadedModel, introduction
from protocol.arena import Arena, LayerRows
from protocol.kv_exchange import KvExchange
from protocol.messages import Fault, FromWorker, Hello, KvOffer, Prefill, SequenceId, Stop, ToWorker
from protocol.segment_registry import SegmentError


class PrefillSequence(Protocol):
    """One prompt."""

    def prefill(self, tokens: Sequence[int]) -> tuple[LayerRows, LayerRows]:
        """Evaluate tokens behind those of former calls; their keys and values, which may be views that
        hold until the next call."""
        ...


class PrefillEngine(LoadedModel, Protocol):
    """The target's model, or a conversion of it."""

    def open(self) -> PrefillSequence: ...


@dataclass(slots=True)
class _Reading:
    asked: Prefill
    sequence: PrefillSequence
    arena: Arena
    seconds: float = 0.0


class PrefillWorker:
    """Reads one prompt after the other, a chunk at a time, so that others' messages are heard in between."""

    def __init__(self, engine: PrefillEngine, exchange: KvExchange, clock: Callable[[], float], chunk: int) -> None:
        """`clock` in seconds, monotonic; `chunk` bounds the tokens of one call of the engine."""
        self._engine = engine
        self._exchange = exchange
        self._clock = clock
        self._chunk = chunk
        self._readings: dict[SequenceId, _Reading] = {}

    def hello(self) -> Hello:
        return introduction("prefill", self._engine)

    def handle(self, message: ToWorker) -> Iterable[FromWorker]:
        match message:
            case Prefill():
                return self._begin(message)
            case Stop(sequence):
                self._forget(sequence)
        return ()

    @property
    def has_work(self) -> bool:
        return bool(self._readings)

    def work(self) -> Iterator[FromWorker]:
        """Read one chunk of the prompt that has waited longest; offer the whole when it is read."""
        reading = next(iter(self._readings.values()))
        began = self._clock()
        done = self._read(reading)
        reading.seconds += self._clock() - began
        if done:
            yield self._offer(reading)

    def _begin(self, asked: Prefill) -> Iterator[FromWorker]:
        held = self._readings.get(asked.sequence)
        if held is not None and held.asked == asked:
            return
        self._forget(asked.sequence)
        if len(asked.tokens) > self._engine.context or max(asked.tokens) >= self._engine.vocabulary:
            yield Fault("refused", "The prompt is beyond what the prefill engine knows.", asked.sequence)
            return
        try:
            arena = self._exchange.create(len(asked.tokens))
        except SegmentError as error:
            yield Fault("refused", str(error), asked.sequence)
            return
        self._readings[asked.sequence] = _Reading(asked, self._engine.open(), arena)

    def _read(self, reading: _Reading) -> bool:
        begin = reading.arena.committed
        tokens = reading.asked.tokens[begin : begin + self._chunk]
        reading.arena.write_rows(begin, *reading.sequence.prefill(tokens))
        reading.arena.commit(begin + len(tokens))
        return reading.arena.committed == len(reading.asked.tokens)

    def _offer(self, reading: _Reading) -> KvOffer:
        """From here on the arena is the orchestrator's to unlink."""
        arena, asked = reading.arena, reading.asked
        del self._readings[asked.sequence]
        arena.close()
        return KvOffer(asked.sequence, arena.name, len(asked.tokens), arena.layout.segment_bytes, reading.seconds)

    def _forget(self, sequence: SequenceId) -> None:
        reading = self._readings.pop(sequence, None)
        if reading is not None:
            reading.arena.close()
            reading.arena.unlink()
