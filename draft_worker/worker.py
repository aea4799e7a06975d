"""Messages in, growth out: the draft's logic, pure over an engine. Knows no sockets and no model."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from draft_worker.engine import Batch, Engine, EngineSequence, introduction
from draft_worker.logits_processors import DraftLogitsProcessors
from draft_worker.sequence import DraftSequence
from protocol.kv.prefix_cache import Found
from protocol.kv.prefix_sharing import PrefixSharing
from protocol.messages.base import SequenceId
from protocol.messages.sampling import Sampling
from protocol.messages.worker import Fault, FromWorker, Grow, Hello, Reroot, Start, Stop, ToWorker
from protocol.speculation.calibration import Calibration
from protocol.worker.pacing import Pacer

_JOINT_NODES = 64
"""Nodes from which on a growth step takes in no further sequence: each must get its growth soon."""


class DraftWorker:
    """Serves many sequences in turns. A growth step grows the trees of all that are ready, where the engine can."""

    def __init__(
        self,
        engine: Engine,
        clock: Callable[[], float],
        prefill_chunk: int = 512,
        pacer: Pacer | None = None,
        prefix_cache: int = 0,
    ) -> None:
        """`clock` in seconds, monotonic; `prefill_chunk` bounds the tokens of one prefill forward; `pacer` is
        the one that holds the engine, if one does. `prefix_cache`: bytes of KV of ended sequences; 0 lets no sequence
        profit from another."""
        self._engine = engine
        self._pacer = pacer or Pacer(None)
        self._clock = clock
        self._chunk = prefill_chunk
        self._sequences: dict[SequenceId, DraftSequence] = {}
        self._turns: deque[SequenceId] = deque()
        self._calibrations = {True: Calibration(), False: Calibration()}
        """By whether the request is greedy: noise changes what a claim is worth."""
        self._prefix_sharing = PrefixSharing(self._sequences, prefix_cache, lambda kv: kv.close())
        self._restraints = DraftLogitsProcessors(engine)

    def hello(self) -> Hello:
        return introduction("draft", self._engine)

    def handle(self, message: ToWorker) -> Iterable[FromWorker]:
        match message:
            case Start():
                return self._start(message)
            case Reroot():
                return self._reroot(message)
            case Stop():
                self._end(message.sequence)
        return ()

    @property
    def has_work(self) -> bool:
        return any(sequence.has_work for sequence in self._sequences.values())

    def work(self) -> Iterable[FromWorker]:
        """A chunk of a prompt, or a growth step."""
        ready = [self._sequences[id] for id in self._turns if self._sequences[id].has_work]
        if not ready:
            return ()
        if ready[0].prefilling:
            self._served(ready[:1])
            return self._prefill([sequence.id for sequence in ready if sequence.prefilling])
        return self._grow([sequence for sequence in ready if not sequence.prefilling])

    def _prefill(self, waiting: Sequence[SequenceId]) -> Iterable[FromWorker]:
        id, found = self._prefix_sharing.next_prefill(waiting)
        sequence = self._sequences[id]
        if found is not None:
            sequence.engine.close()
            sequence.take_over(self._continued(found, sequence.sampling, sequence.vocabulary), found.tokens)
        if sequence.prefilling:
            sequence.prefill(self._chunk)
        return sequence.news(self._clock)

    def _grow(self, ready: Sequence[DraftSequence]) -> Iterator[FromWorker]:
        for sequence in ready:
            yield from sequence.spared()
        began = self._clock()
        asked = self._sharing(ready)
        self._served([sequence for sequence, _ in asked])
        found = self._engine.evaluate_together([(sequence.engine, batch) for sequence, batch in asked])
        grown = [sequence.expand(candidates) for (sequence, _), candidates in zip(asked, found, strict=True)]
        seconds = self._clock() - began
        widths = [len(batch.committed) + len(batch.tokens) for _, batch in asked]
        joint = sum(widths) if len(asked) > 1 else 0
        for (sequence, _), fresh, width in zip(asked, grown, widths, strict=True):
            yield from map(self._with_pace, sequence.publish(fresh, width, seconds, joint))
            yield from sequence.news(self._clock)

    def _sharing(self, ready: Sequence[DraftSequence]) -> list[tuple[DraftSequence, Batch]]:
        """Who takes part in the next step, and with what."""
        asked: list[tuple[DraftSequence, Batch]] = []
        width = 0
        for sequence in ready:
            if asked and (width >= _JOINT_NODES or not self._engine.joint):
                break
            batch = sequence.ask()
            asked.append((sequence, batch))
            width += len(batch.tokens)
        return asked

    def _served(self, sequences: Iterable[DraftSequence]) -> None:
        """It is the others' turn."""
        for sequence in sequences:
            self._turns.remove(sequence.id)
            self._turns.append(sequence.id)

    def _with_pace(self, grow: Grow) -> Grow:
        paced = self._pacer.take()
        return grow if paced is None else msgspec.structs.replace(grow, paced=paced)

    def _start(self, message: Start) -> Iterator[FromWorker]:
        sequence = self._sequences.get(message.sequence)
        if not self._knows(message.tokens):
            yield self._refuse(message.sequence)
        elif sequence is None or sequence.sampling != message.sampling:
            self._end(message.sequence)
            self._sequences[message.sequence] = self._opened(message)
            self._turns.append(message.sequence)
        elif (sequence.round, sequence.position) != (message.round, len(message.tokens) - 1):
            sequence.restart(message, self._restraints.at(message))

    def _opened(self, start: Start) -> DraftSequence:
        # The KV that an earlier life left of this very sequence is more than any other sequence has of it.
        found = self._prefix_sharing.find(start.tokens[:-1]) if start.adopt is None else None
        if found is None:
            engine = self._engine.open(start.sampling, start.vocabulary or self._engine.vocabulary)
        else:
            engine = self._continued(found, start.sampling, start.vocabulary)
        # The last position the model knows predicts a token that no one has a position for.
        horizon = self._engine.context - 1
        calibration = self._calibrations[start.sampling.temperature == 0]
        held = 0 if found is None else found.tokens
        return DraftSequence(start, engine, horizon, calibration, held, self._restraints.at(start))

    def _continued(self, found: Found[EngineSequence], sampling: Sampling, vocabulary: int | None) -> EngineSequence:
        """An engine's sequence with the KV that was found."""
        known = vocabulary or self._engine.vocabulary
        return found.kv.reopen(found.tokens, sampling, known, exclusive=found.exclusive)

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
        self._end(sequence)
        text = f"The draft's vocabulary ends at {self._engine.vocabulary}: choose a draft of the target's family."
        return Fault("refused", text, sequence)

    def _end(self, id: SequenceId) -> None:
        """The sequence has ended: its KV may serve others."""
        sequence = self._sequences.pop(id, None)
        if sequence is not None:
            self._turns.remove(id)
            self._prefix_sharing.end(sequence)
