"""The target's side of the conversation: messages in, messages out. Pure over its engine and clock."""

import logging
from collections.abc import Callable, Iterator, Sequence

from protocol.kv.prefix_sharing import PrefixSharing
from protocol.kv.segments import SegmentError
from protocol.messages.base import SequenceId, plain
from protocol.messages.worker import (
    Fault,
    Forest,
    FromWorker,
    Hello,
    KvOffer,
    KvRelease,
    Prefilled,
    Start,
    Stop,
    ToWorker,
    Verdict,
    Verify,
)
from protocol.sampling.grammar import GrammarError
from protocol.worker.pacing import Pacer
from target_worker.engine import TargetEngine, TargetSequence
from target_worker.kv.target_kv import TargetKv
from target_worker.verification.acceptance import Acceptance
from target_worker.verification.proposed_tree import ProposedTree, flaw

log = logging.getLogger(__name__)


class TargetWorker:
    """Serves any number of sequences. A verification runs as soon as it is read; in between, committed KV is
    saved to shared memory a slice at a time, and prompts are evaluated a chunk at a time, in turns."""

    def __init__(
        self,
        engine: TargetEngine,
        clock: Callable[[], float],
        introduction: Hello,
        pacer: Pacer | None = None,
        prefix_cache: int = 0,
    ) -> None:
        """`prefix_cache`: bytes of KV of ended sequences; 0 lets no sequence profit from another."""
        self._engine = engine
        self._pacer = pacer or Pacer(None)
        self._clock = clock
        self._introduction = introduction
        self._sequences: dict[SequenceId, TargetSequence] = {}
        """In the order of their turns to be prefilled."""
        self._prefix_sharing = PrefixSharing(self._sequences, prefix_cache, TargetKv.close)
        self._saving: list[SequenceId] = []

    def hello(self) -> Hello:
        return self._introduction

    def handle(self, message: ToWorker) -> Iterator[FromWorker]:
        match message:
            case Start():
                yield from self._start(message)
            case Verify():
                yield from self._verify((message,))
            case Forest(trees):
                yield from self._verify(trees)
            case KvRelease(name):
                self._release(name)
            case Stop(sequence):
                self._end(sequence)

    @property
    def has_work(self) -> bool:
        return bool(self._saving) or any(sequence.prefilling for sequence in self._sequences.values())

    def work(self) -> Iterator[FromWorker]:
        """Save one slice of a sequence, or evaluate one chunk of the prompt whose turn it is."""
        if self._saving:
            yield from self._save(self._saving.pop(0))
            return
        began = self._clock()
        waiting = [id for id, sequence in self._sequences.items() if sequence.prefilling]
        id, found = self._prefix_sharing.next_prefill(waiting)
        sequence = self._sequences[id] = self._sequences.pop(id)
        if found is not None:
            sequence.take_over(found)
        before = sequence.evaluated
        sequence.prefill()
        self._pacer.prefill(began, sequence.evaluated - before)
        sequence.seconds += self._clock() - began
        if not sequence.prefilling:
            yield self._prefilled(sequence)

    def _prefilled(self, sequence: TargetSequence) -> Prefilled:
        self._note_unsaved(sequence)
        return Prefilled(
            sequence.start.sequence,
            sequence.round,
            sequence.evaluated,
            sequence.seconds,
            sequence.adopted,
            sequence.warning[:4000],
            self._pacer.take(),
        )

    def _note_unsaved(self, sequence: TargetSequence) -> None:
        id = sequence.start.sequence
        if sequence.unsaved and id not in self._saving:
            self._saving.append(id)

    def _save(self, id: SequenceId) -> Iterator[FromWorker]:
        sequence = self._sequences[id]
        if sequence.checkpoint is None or not sequence.unsaved:
            return
        began = self._clock()
        try:
            saved = sequence.checkpoint.save(sequence.cache)
        except SegmentError as error:
            log.warning("sequence %d is not saved: %s", id, error)
            sequence.checkpoint.close()
            return
        self._note_unsaved(sequence)
        if saved is not None:
            yield KvOffer(id, saved.name, saved.tokens, sequence.checkpoint.size, self._clock() - began)

    def _release(self, name: str) -> None:
        for kv in (*(sequence.kv for sequence in self._sequences.values()), *self._prefix_sharing.ended):
            if kv.checkpoint is not None:
                kv.checkpoint.release(name)

    def _start(self, start: Start) -> Iterator[FromWorker]:
        held = self._sequences.get(start.sequence)
        if held is not None and held.start == start and held.round == start.round:
            if not held.prefilling:
                yield self._prefilled(held)
            return
        self._forget(start.sequence)
        if refusal := self._refusal(start):
            yield Fault("refused", refusal, start.sequence)
            return
        try:
            processors = self._engine.processors(start)
        except GrammarError as error:
            yield Fault("refused", plain(str(error)), start.sequence)
            return
        began = self._clock()
        if held is None:
            sequence = self._engine.open(start, processors, self._prefix_sharing.find(start.tokens[:-1]))
        else:
            sequence = self._engine.reopen(held, start, processors)
        sequence.seconds = self._clock() - began if sequence.adopted else 0.0
        self._sequences[start.sequence] = sequence
        if not sequence.prefilling:
            yield self._prefilled(sequence)

    def _refusal(self, start: Start) -> str | None:
        model = self._engine.model
        if len(start.tokens) > model.context:
            return (
                f"The prompt has {len(start.tokens):,} tokens and the target's context holds {model.context:,}: "
                "shorten the prompt."
            )
        if max(start.tokens) >= model.vocabulary:
            return (
                f"The prompt holds token {max(start.tokens)}; the target's vocabulary ends at {model.vocabulary - 1}."
            )
        return None

    def _verify(self, trees: Sequence[Verify]) -> Iterator[FromWorker]:
        """One forward over all trees that there is no other answer to."""
        began = self._clock()
        asked: dict[SequenceId, Verify] = {}
        for verify in trees:
            answer = None if verify.sequence in asked else self._without_forward(verify)
            if answer is None:
                # Of two trees of one sequence the last counts.
                asked[verify.sequence] = verify
            else:
                yield from answer
        if not asked:
            return
        proposals = [(self._sequences[id], ProposedTree(verify)) for id, verify in asked.items()]
        evaluating = self._clock()
        walks = self._engine.verify(proposals)
        self._pacer.forward(evaluating, sum(len(proposal.tokens) for _, proposal in proposals))
        seconds = self._clock() - began
        answers = []
        for verify, (_, proposal), walk in zip(asked.values(), proposals, walks, strict=True):
            if isinstance(walk, GrammarError):
                answers.append(_refused(verify, plain(str(walk))))
                continue
            path, paced = proposal.path(walk.accepted), self._pacer.take()
            answers.append(Verdict(verify.sequence, verify.round, path, walk.bonus, seconds, paced, walk.likelihoods))
        yield from answers
        # The verdicts are on their way; tidying up no longer delays anyone.
        for (sequence, proposal), walk, answer in zip(proposals, walks, answers, strict=True):
            if isinstance(walk, Acceptance) and isinstance(answer, Verdict):
                sequence.advance(proposal, walk, answer)
                self._note_unsaved(sequence)

    def _without_forward(self, verify: Verify) -> tuple[FromWorker, ...] | None:
        """What there is to say to a tree that is not to be evaluated; None if it is."""
        sequence = self._sequences.get(verify.sequence)
        if sequence is None:
            return (Fault("lost", "The target does not know this sequence.", verify.sequence),)
        if verify.round < sequence.round:
            # Asked again, because the answer was lost or slow. Rounds before the last are settled.
            last = sequence.verdict
            return (last,) if last is not None and last.round == verify.round else ()
        if misfit := _misfit(sequence, verify):
            return (Fault("lost", misfit, verify.sequence),)
        if refusal := flaw(verify, sequence.sampling, self._engine.model.vocabulary, self._engine.model.context):
            return (_refused(verify, refusal),)
        return None

    def _end(self, id: SequenceId) -> None:
        """The sequence has ended: its KV may serve others."""
        sequence = self._forget(id)
        if sequence is not None:
            self._prefix_sharing.end(sequence)

    def _forget(self, id: SequenceId) -> TargetSequence | None:
        """What it saved stays, for others."""
        if id in self._saving:
            self._saving.remove(id)
        return self._sequences.pop(id, None)


def _refused(verify: Verify, text: str) -> Fault:
    return Fault("refused", text, verify.sequence, len(verify.tokens) - 1)


def _misfit(sequence: TargetSequence, verify: Verify) -> str | None:
    """How the sequence here and the one in the message differ, if they do."""
    if sequence.prefilling:
        return "The target is still prefilling this sequence."
    here = (sequence.round, sequence.position, sequence.root, sequence.tokens[-1])
    there = (verify.round, verify.position, verify.root, verify.tokens[0])
    if here != there:
        return f"The target is at round {here[0]}, position {here[1]}; the message is for {there[0]}, {there[1]}."
    return None
