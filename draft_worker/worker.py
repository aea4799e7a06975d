"""Messages in, growth out: the draft's logic, pure over an engine. Knows no sockets and no model."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

import msgspec

from draft_worker.engines import Engine
from draft_worker.loaded_model import introduction
from draft_worker.sequence import DraftSequence
from protocol.calibration import Calibration
from protocol.messages import Fault, FromWorker, Grow, Hello, Reroot, SequenceId, Start, Stop, ToWorker
from protocol.pacing import Pacer


class DraftWorker:
    """Serves many sequences, one unit of work of one of them at a time, in turns."""

    def __init__(
        self, engine: Engine, clock: Callable[[], float], prefill_chunk: int = 512, pacer: Pacer | None = None
    ) -> None:
        """`clock` in seconds, monotonic; `prefill_chunk` bounds the tokens of one prefill forward; `pacer` is
        the one that holds the engine, if one does."""
        self._engine = engine
        self._pacer = pacer or Pacer(None)
        self._clock = clock
        self._chunk = prefill_chunk
        self._sequences: dict[SequenceId, DraftSequence] = {}
        self._turns: deque[SequenceId] = deque()
        self._calibrations = {True: Calibration(), False: Calibration()}
        """By whether the request is greedy: noise changes what a claim is worth."""

    def hello(self) -> Hello:
        return introduction("draft", self._engine)

    def handle(self, message: ToWorker) -> Iterable[FromWorker]:
        match message:
            case Start():
                return self._start(message)
            case Reroot():
                return self._reroot(message)
            case Stop():
                self._forget(message.sequence)
        return ()

    @property
    def has_work(self) -> bool:
        return any(sequence.has_work for sequence in self._sequences.values())

    def work(self) -> Iterable[FromWorker]:
        for _ in range(len(self._turns)):
            sequence = self._sequences[self._turns[0]]
            self._turns.rotate(-1)
            if sequence.has_work:
                return chain(map(self._with_pace, sequence.work(self._chunk, self._clock)), sequence.news(self._clock))
        return ()

    def _with_pace(self, grow: Grow) -> Grow:
        paced = self._pacer.take()
        return grow if paced is None else msgspec.structs.replace(grow, paced=paced)

    def _start(self, message: Start) -> Iterator[FromWorker]:
        sequence = self._sequences.get(message.sequence)
        if not self._knows(message.tokens):
            yield self._refuse(message.sequence)
        elif sequence is None or sequence.sampling != message.sampling:
            self._forget(message.sequence)
            opened = self._engine.open(message.sampling, message.vocabulary or self._engine.vocabulary)
            # The last position the model knows predicts a token that no one has a position for.
            calibration = self._calibrations[message.sampling.temperature == 0]
            horizon = self._engine.context - 1
            self._sequences[message.sequence] = DraftSequence(message, opened, horizon, calibration)
            self._turns.append(message.sequence)
        elif (sequence.round, sequence.position) != (message.round, len(message.tokens) - 1):
            sequence.restart(message)

    def _reroot(self, message: Reroot) -> Iterator[FromWorker]:
        sequence = self._sequences.get(message.sequence)
        if sequence is None:
            yield Fault("lost", "The draft does not know this sequence: start it again.", message.sequence)
        elif message.round <= sequence.round:
            return
        elif not self._knows(message.tokens):
            yield self._refuse(message.sequence)
        elif not sequence.follows(message):
            text = f"The draft is at position {sequence.position}, round {sequence.round}: start the sequence again."
            yield Fault("lost", text, message.sequence)
        else:
            yield from sequence.reroot(message)

    def _knows(self, tokens: Iterable[int]) -> bool:
        return max(tokens) < self._engine.vocabulary

    def _refuse(self, sequence: SequenceId) -> Fault:
        self._forget(sequence)
        text = f"The draft's vocabulary ends at {self._engine.vocabulary}: choose a draft of the target's family."
        return Fault("refused", text, sequence)

    def _forget(self, sequence: SequenceId) -> None:
        known = self._sequences.pop(sequence, None)
        if known is not None:
            self._turns.remove(sequence)
            known.close()
