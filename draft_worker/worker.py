"""The draft's logic: messages in, growth out. Pure over an engine; knows no sockets and no model."""

import gc
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest

import msgspec

from draft_worker.engine_interface import Batch, Engine, EngineSequence
from draft_worker.features import Attach, FeatureFeed, attached_ring
from draft_worker.sequence import AcceptanceCheck, DraftSequence, FeatureFedSequence
from protocol.kv.prefix_sharing import Found, PrefixSharing
from protocol.messages.base import RequestId, plain
from protocol.messages.features import Features, FeatureShipment
from protocol.messages.sampling import Sampling
from protocol.messages.worker import Extend, Fault, FromWorker, Grow, Hello, KvCut, Reroot, Start, Stop, ToWorker
from protocol.speculation.rolling_context import RollingContext
from protocol.speculation.token_tree import Calibration, Candidates
from protocol.worker.interface import WorkerReply
from protocol.worker.pacing import PacedPart, Pacer

_JOINT_NODES = 64
"""A growth step that has this many nodes takes in no further sequence, so that every step stays short."""


class DraftWorker:
    """Serves many sequences in turns. If the engine is `joint`, one growth step grows the trees of several."""

    def __init__(
        self,
        engine: Engine,
        clock: Callable[[], float],
        prefill_chunk: int = 512,
        pacer: Pacer | None = None,
        prefix_cache: int = 0,
        attach: Attach = attached_ring,
        pool: int | None = None,
    ) -> None:
        """`clock`: seconds, monotonic. `prefill_chunk`: most tokens of one prefill forward. `pacer`: holds
        forwards to the times of another device. `prefix_cache`: bytes of KV of ended sequences to keep; 0 also shares
        no KV between live ones. `attach`: opens feature rings. `pool`: bytes of KV of live and
        ended sequences; None for no bound."""
        self._engine = engine
        self._attach = attach
        self._rolling = RollingContext(engine.context)
        self._pacer = pacer or Pacer(None)
        self._clock = clock
        self._chunk = prefill_chunk
        self._sequences: dict[RequestId, DraftSequence] = {}
        self._queue: deque[RequestId] = deque()
        self._calibrations = {True: Calibration(), False: Calibration()}
        """By whether the request is greedy: noise changes how often a guess with a given probability comes true."""
        self._check = AcceptanceCheck(engine.expected)
        self._prefix_sharing = PrefixSharing(self._sequences, prefix_cache, lambda kv: kv.close(), pool)
        self._at_work: tuple[RequestId, ...] = ()
        """Sequences whose KV the present call changes."""

    def hello(self) -> Hello:
        # A paced worker has the device's costs, not those that this machine measured.
        costs = self._pacer.costs() or self._engine.costs
        return Hello(
            role="draft",
            engine=self._engine.name,
            model=plain(self._engine.model),
            architecture=self._engine.architecture,
            vocabulary=self._engine.vocabulary,
            context=self._engine.context,
            tokenizer_fingerprint=self._engine.tokenizer,
            device=self._engine.device,
            pid=os.getpid(),
            costs=costs,
            block=self._engine.block,
            features=self._engine.features,
        )

    def handle(self, message: ToWorker | FeatureShipment) -> Iterable[WorkerReply]:
        match message:
            case Start():
                return self._start(message)
            case Reroot():
                return self._reroot(message)
            case Extend() if message.request in self._sequences:
                self._sequences[message.request].extend(message)
            case Features(request=id, first=first):
                self._hear_features(self._sequences.get(id), first, message)
            case FeatureShipment(block):
                self._hear_features(self._sequences.get(block.request), block.first, message)
            case Stop():
                return self._end(message.request)
        return ()

    @property
    def has_work(self) -> bool:
        return any(sequence.has_work for sequence in self._sequences.values())

    def work(self) -> Iterable[FromWorker]:
        """One prefill chunk, or one growth step."""
        ready = [self._sequences[id] for id in self._queue if self._sequences[id].has_work]
        if not ready:
            return ()
        if ready[0].prefilling:
            self._move_to_back(ready[:1])
            self._prefill([sequence.id for sequence in ready if sequence.prefilling])
            return ()
        return self._grow([sequence for sequence in ready if not sequence.prefilling])

    def run_short(self) -> Iterator[Fault]:
        """Free the sequences at work. They begin again if the prefix cache had memory to spare; otherwise the target
        goes on without this draft."""
        torn = [id for id in self._at_work if id in self._sequences]
        kind = "lost" if self._free_with_cache(torn) else "refused"
        for id in torn:
            yield Fault(kind, "The draft ran out of memory for this sequence.", id)

    def run_interrupted(self) -> Iterator[Fault]:
        """Free all sequences. The orchestrator starts each again, at most once a round."""
        torn = list(self._sequences)
        self._free_with_cache(torn)
        for id in torn:
            yield Fault("lost", "The GPU gave up a command of the draft.", id)

    def _free_with_cache(self, torn: Iterable[RequestId]) -> bool:
        """Remove these sequences and all KV of ended ones; whether there was any."""
        for id in torn:
            self._queue.remove(id)
            sequence = self._sequences.pop(id)
            sequence.close()
            sequence.kv.close()
        spared = self._prefix_sharing.clear()
        gc.collect()
        return spared

    def _prefill(self, waiting: Sequence[RequestId]) -> None:
        id, found = self._prefix_sharing.next_prefill(waiting)
        sequence, self._at_work = self._sequences[id], (id,)
        if found is not None:
            self._take_over(sequence, found)
        if sequence.prefilling:
            began = self._clock()
            read = sequence.prefill(self._chunk)
            if read.tokens:
                self._pacer.prefill(began, read)
        self._prefix_sharing.fit()

    def _take_over(self, sequence: DraftSequence, found: Found[EngineSequence]) -> None:
        sequence.engine.close()
        sequence.take_over(self._continued(found, sequence.sampling, sequence.vocabulary), found.tokens)

    def _hear_features(self, sequence: DraftSequence | None, first: int, message: Features | FeatureShipment) -> None:
        """Features from position `first` on. If the target reused the KV of earlier tokens, it has none of them, but
        another sequence here may."""
        if not isinstance(sequence, FeatureFedSequence):
            return
        if sequence.can_take_over and sequence.prefilled < first:
            found = self._prefix_sharing.find(sequence.prefix, sequence.prefilled)
            if found is not None:
                self._take_over(sequence, found)
        sequence.hear_features(message)

    def _grow(self, ready: Sequence[DraftSequence]) -> Iterator[FromWorker]:
        for sequence in ready:
            yield from sequence.reuse()
        began = self._clock()
        parts = self._growth_parts(ready)
        self._at_work = tuple(sequence.id for sequence, _ in parts)
        self._move_to_back([sequence for sequence, _ in parts])
        staleness = [sequence.engine.staleness for sequence, _ in parts]
        evaluated = self._evaluated([(sequence.engine, batch) for sequence, batch in parts])
        grown = [sequence.expand(candidates) for (sequence, _), candidates in zip(parts, evaluated, strict=True)]
        seconds = self._clock() - began
        widths = [len(batch.committed) + len(batch.tokens) for _, batch in parts]
        joint = sum(widths) if len(parts) > 1 else 0
        for (sequence, _), nodes, width, stale in zip(parts, grown, widths, staleness, strict=True):
            yield from map(self._with_pace, sequence.publish(nodes, width, seconds, joint, stale))

    def _evaluated(self, parts: Sequence[tuple[EngineSequence, Batch]]) -> list[list[Candidates]]:
        """The candidates of these batches, in the time that a paced device would take."""
        if not self._pacer.holds:
            return self._engine.evaluate_together(parts)
        began, contexts = self._clock(), [sequence.committed for sequence, _ in parts]
        candidates = self._engine.evaluate_together(parts)
        for widths in zip_longest(*(_forwards(*part) for part in parts), fillvalue=0):
            self._pacer.forward(began, [PacedPart(*each) for each in zip(widths, contexts, strict=True) if each[0]])
            began = self._clock()
        return candidates

    def _growth_parts(self, ready: Sequence[DraftSequence]) -> list[tuple[DraftSequence, Batch]]:
        """The sequences of the next growth step, each with its batch."""
        chosen: list[DraftSequence] = []
        nodes = 0
        for sequence in ready:
            together = [(each.engine, each.next_rows) for each in (*chosen, sequence)]
            if not chosen or (nodes < _JOINT_NODES and self._engine.joins(together)):
                chosen.append(sequence)
                nodes += sequence.next_nodes
        return [(sequence, sequence.next_batch()) for sequence in chosen]

    def _move_to_back(self, sequences: Iterable[DraftSequence]) -> None:
        """Put `sequences` at the end of the queue."""
        for sequence in sequences:
            self._queue.remove(sequence.id)
            self._queue.append(sequence.id)

    def _with_pace(self, grow: Grow) -> Grow:
        paced = self._pacer.take()
        return grow if paced is None else msgspec.structs.replace(grow, paced=paced)

    def _start(self, message: Start) -> Iterator[FromWorker]:
        sequence = self._sequences.get(message.request)
        if not self._knows(message.tokens):
            yield from self._refuse(message.request)
        elif sequence is None or sequence.sampling != message.sampling:
            yield from self._end(message.request)
            self._sequences[message.request] = self._opened(message)
            self._queue.append(message.request)
        elif (sequence.round, sequence.position) != (message.round, len(message.tokens) - 1):
            sequence.restart(message, self._engine.processors(message))

    def _opened(self, start: Start) -> DraftSequence:
        found = self._prefix_sharing.find(self._rolling.seen(start.tokens[:-1]))
        if found is None:
            engine = self._engine.open(start.sampling, start.vocabulary or self._engine.vocabulary)
        else:
            engine = self._continued(found, start.sampling, start.vocabulary)
        calibration = self._calibrations[start.sampling.greedy]
        held = 0 if found is None else found.tokens
        processors, form = self._engine.processors(start), self._engine.features
        if form is None:
            return DraftSequence(start, engine, self._rolling, calibration, held, processors)
        feed = FeatureFeed(form, self._rolling, self._clock, self._attach)
        return FeatureFedSequence(start, engine, self._rolling, calibration, held, processors, feed, self._check)

    def _continued(self, found: Found[EngineSequence], sampling: Sampling, vocabulary: int | None) -> EngineSequence:
        """An engine's sequence that continues with the KV in `found`."""
        known = vocabulary or self._engine.vocabulary
        return found.kv.reopen(found.tokens, sampling, known, exclusive=found.exclusive)

    def _reroot(self, message: Reroot) -> Iterator[FromWorker]:
        sequence = self._sequences.get(message.request)
        if sequence is None:
            yield Fault("lost", "The draft does not know this sequence: start it again.", message.request)
        elif message.round <= sequence.round:
            return
        elif not self._knows(message.tokens):
            yield from self._refuse(message.request)
        elif not sequence.follows(message):
            text = f"The draft is at position {sequence.position}, round {sequence.round}: start the sequence again."
            yield Fault("lost", text, message.request)
        else:
            yield from sequence.reroot(message)
            yield from self._check.report()

    def _knows(self, tokens: Iterable[int]) -> bool:
        return max(tokens) < self._engine.vocabulary

    def _refuse(self, sequence: RequestId) -> Iterator[FromWorker]:
        yield from self._end(sequence)
        text = f"The draft's vocabulary ends at {self._engine.vocabulary}: choose a draft of the target's family."
        yield Fault("refused", text, sequence)

    def _end(self, id: RequestId) -> Iterator[KvCut]:
        """The sequence has ended: its KV goes to the prefix cache."""
        sequence = self._sequences.pop(id, None)
        if sequence is not None:
            self._queue.remove(id)
            sequence.close()
            cut = self._prefix_sharing.end(sequence)
            if cut is not None:
                yield KvCut(cut.kept, cut.tokens, cut.memory)


def _forwards(sequence: EngineSequence, batch: Batch) -> Sequence[int]:
    """Tokens of each forward that has evaluated `batch`."""
    stated = sequence.forward_widths
    return [len(batch.committed) + len(batch.tokens)] if stated is None else stated
