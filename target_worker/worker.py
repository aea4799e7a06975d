"""The target worker: messages in, messages out. Pure, given its engine and clock."""

import gc
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import mlx.core as mx
from msgspec.structs import replace

from protocol.kv.prefix_index import MIN_SHARED_TOKENS
from protocol.kv.prefix_sharing import Found, PrefixSharing, shared_tokens
from protocol.kv.segments import SegmentError
from protocol.messages.base import MAX_NODES, RequestId, plain
from protocol.messages.features import FeaturesTaken, Tap
from protocol.messages.kv import KvOffer, KvRelease
from protocol.messages.worker import (
    CacheOff,
    Fault,
    Forest,
    FromWorker,
    Hello,
    KvCut,
    Lowered,
    Prefilled,
    Prefilling,
    PromptLogprobs,
    Start,
    Stop,
    ToWorker,
    Verdict,
    Verify,
)
from protocol.sampling.grammar import GrammarError
from protocol.worker.interface import WorkerReply
from protocol.worker.pacing import PacedPart, Pacer
from target_worker.disk_cache.cache import DiskCache, DiskWork
from target_worker.engine import Pick, Proposal, TargetEngine, TargetSequence
from target_worker.feature_rings import Announcement, FeatureRings
from target_worker.kv import TargetKv
from target_worker.verification import Acceptance, ProposedTree, flaw

log = logging.getLogger(__name__)


_FIT_TOKENS = 256
"""A live sequence's KV grows by so many tokens at once."""
_INTERRUPTIONS = 3
"""So often in succession the GPU gives up a command for a sequence until that ends."""
_GIVEN_UP = (
    "The GPU gave up this request's commands again and again, because they took too long beside what other programs "
    "do there: end these, or shorten the request."
)


class _Forward(NamedTuple):
    """A forward that has begun."""

    proposals: list[Proposal]
    logits: list[mx.array]
    """Of each proposal, computed meanwhile."""
    picks: list[Pick]
    """The token behind each root, if it is sampled already: then the roots are all that is evaluated."""
    began: float

    def part(self, ids: Collection[RequestId]) -> "_Forward | None":
        """That of some sequences; None if it has none of them."""
        places = [place for place, (sequence, _) in enumerate(self.proposals) if sequence.start.request in ids]
        if len(places) == len(self.proposals):
            return self
        proposals, logits = [self.proposals[place] for place in places], [self.logits[place] for place in places]
        picks = [self.picks[place] for place in places] if self.picks else []
        return _Forward(proposals, logits, picks, self.began) if places else None

    @property
    def sequences(self) -> dict[RequestId, TargetSequence]:
        return {sequence.start.request: sequence for sequence, _ in self.proposals}


class TargetWorker:
    """Serves any number of sequences.

    A verification runs as soon as its message is read. A forward over roots alone that will be asked for begins before
    its message: on a GPU even before these tokens are read, as in mlx-lm's own loop. Between verifications, committed
    KV is saved to shared memory a slice at a time, and prompts are evaluated a chunk at a time, in turns.
    """

    def __init__(
        self,
        engine: TargetEngine,
        clock: Callable[[], float],
        hello: Hello,
        pacer: Pacer | None = None,
        prefix_cache: int = 0,
        rings: FeatureRings | None = None,
        disk: DiskCache | None = None,
        pool: int | None = None,
    ) -> None:
        """`prefix_cache`: bytes of KV of ended sequences; 0 turns off sharing between sequences. Without `rings`
        nothing is recorded for drafts. `disk`: keeps KV of ended sequences for a later start. `pool`: bytes of KV of
        live and ended sequences together; None for no bound."""
        self._engine = engine
        self._pacer = pacer or Pacer(None)
        self._clock = clock
        self._hello = hello
        self._sequences: dict[RequestId, TargetSequence] = {}
        """In the order of their turns to be prefilled."""
        self._prefix_sharing = PrefixSharing(self._sequences, prefix_cache, TargetKv.close, pool)
        self._ended: dict[RequestId, TargetSequence] = {}
        """Sequences whose KV goes to the prefix cache, which may cut it, once it is saved to shared memory."""
        self._rings = rings
        self._saving = KvSaving(clock)
        self._saving_seconds = 0.0
        """Spent on saving KV since the last Verdict or Prefilled."""
        self._begun: _Forward | None = None
        """A forward over roots alone that has begun before their Verify."""
        self._due: tuple[RequestId, ...] = ()
        """Sequences whose next forward is to begin so."""
        self._disk = DiskWork(disk, engine.model.sequence, clock)
        self._at_work: tuple[RequestId, ...] = ()
        """Sequences whose KV the present call changes."""
        self._begun_again: set[RequestId] = set()
        """Sequences that ran out of memory before."""
        self._interrupted: Counter[RequestId] = Counter()
        """How often in succession the GPU gave up a command for a sequence."""

    def hello(self) -> Hello:
        # A paced worker has the device's costs, not those that this machine measured.
        pacer = self._pacer
        return (
            replace(self._hello, costs=pacer.costs(), context_costs=pacer.context_costs())
            if pacer.holds
            else self._hello
        )

    def handle(self, message: ToWorker) -> Iterator[WorkerReply]:
        if self._rings is not None and isinstance(message, FeaturesTaken):
            # It does not change what a sequence computes next.
            yield from self._rings.taken(message.number)
            return
        self._due = ()
        match message:
            case Start():
                self._at_work = (message.request,)
                yield from self._start(message)
            case Verify():
                yield from self._verify((message,))
            case Forest(trees):
                yield from self._verify(trees)
            case Tap() if self._rings is not None:
                self._rings.record(message)
            case KvRelease(name):
                self._release(name)
            case Stop(sequence):
                yield from self._end(sequence)

    @property
    def has_work(self) -> bool:
        return bool(self._due) or self._other_work

    @property
    def _other_work(self) -> bool:
        return (
            self._saving.next is not None
            or self._disk.has_work
            or any(sequence.prefilling for sequence in self._sequences.values())
        )

    def work(self) -> Iterator[WorkerReply]:
        """Begin a forward before its Verify, save one slice of a sequence, take up what was read from disk, or evaluate
        one chunk of the next prompt, in turns with what goes to disk."""
        if self._due:
            self._at_work, self._due = self._due, ()
            roots = [(self._sequences[id], self._sequences[id].root_alone()) for id in self._at_work]
            self._begun = self._forward(roots)
            return
        waiting = [id for id, each in self._sequences.items() if each.prefilling and not self._disk.reads(id)]
        saved = self._saving.next
        # What an ended sequence left is saved when nobody waits for a prompt.
        if saved is not None and (saved in self._sequences or not waiting):
            self._at_work, began = (saved,), self._clock()
            yield from self._saving.save()
            self._saving_seconds += self._clock() - began
            if saved in self._ended and not self._saving.saves(saved):
                yield from self._cache(saved)
            return
        if reason := self._disk.turned_off():
            yield CacheOff(plain(reason))
            return
        read = self._disk.due()
        if read is not None:
            self._at_work = (read,)
            self._disk.take_up(read)
            if not self._sequences[read].prefilling:
                yield self._prefilled(self._sequences[read])
            return
        self._at_work, began = (), self._clock()
        if self._disk.takes_turn(bool(waiting)):
            self._saving_seconds += self._clock() - began
            return
        if not waiting:
            self._disk.wait()
            return
        yield from self._prefill(waiting)

    def _prefill(self, waiting: Sequence[RequestId]) -> Iterator[WorkerReply]:
        """Evaluate one chunk of one of the prompts."""
        id, found = self._turn(waiting)
        sequence = self._sequences[id] = self._sequences.pop(id)
        self._at_work = (id,)
        if found is not None and found.exclusive:
            self._disk.settle(found.kv.cache)
        began = self._clock()
        if found is not None:
            sequence.take_over(found)
        before, context = sequence.evaluated, sequence.prefilled
        sequence.prefill()
        self._pacer.prefill(began, PacedPart(sequence.evaluated - before, context))
        sequence.seconds += self._clock() - began
        yield from _token_logprobs(sequence, before)
        if sequence.prefilling:
            yield Prefilling(id, sequence.round, sequence.prefilled)
        if found is not None and found.exclusive:
            self._saving.drop(sequence)
        self._prefix_sharing.fit()
        if not sequence.prefilling:
            yield self._prefilled(sequence)
        yield from self._features(sequence, context)

    def _turn(self, waiting: Sequence[RequestId]) -> tuple[RequestId, Found[TargetKv] | None]:
        """The sequence whose prompt is next, and the KV that it waited for, if it waited. One that tells of its whole
        prompt takes no other's KV."""
        telling = [id for id in waiting if self._sequences[id].sampling.prompt_logprobs]
        if waiting[0] in telling:
            return waiting[0], None
        return self._prefix_sharing.next_prefill([id for id in waiting if id not in telling])

    def run_short(self) -> Iterator[Fault]:
        """Free the sequences at work. They begin again if the prefix cache had memory to spare; otherwise the one with
        most tokens ends, for which there is too little memory."""
        known = self._sequences
        lengths = {id: len(known[id].tokens) if id in known else 0 for id in self._at_work}
        longest = max(lengths, key=lambda id: lengths[id], default=None)
        spared = self._free_with_cache(lengths)
        for id, length in lengths.items():
            if id == longest and (not spared or id in self._begun_again):
                yield Fault("refused", too_little(length, len(self._sequences)), id)
            else:
                self._begun_again.add(id)
                yield Fault("lost", "The target ran out of memory and freed some: start the sequence again.", id)

    def run_interrupted(self) -> Iterator[Fault]:
        """Free all sequences. They begin again, except for one at whose work the GPU gave up for the third time."""
        ids = {*self._sequences, *self._at_work}
        self._interrupted.update(self._at_work)
        self._free_with_cache(ids)
        for id in sorted(ids):
            if self._interrupted[id] >= _INTERRUPTIONS:
                yield Fault("refused", _GIVEN_UP, id)
            else:
                yield Fault("lost", "The GPU gave up a command: start the sequence again.", id)

    def lower(self, reason: str) -> Iterator[Lowered | Fault] | None:
        """Evaluate at the next lower level, because a forward failed for this `reason`: the proof at the start was
        wrong. What is returned frees all sequences, whose KV is of the level before; each begins again with its next
        Start. None at the lowest level."""
        if not self._engine.model.lower(reason):
            return None
        log.warning("a forward failed, so the target is a %s model now: %s", self._engine.model.level, reason)
        return self._begin_all_again(reason)

    def _begin_all_again(self, reason: str) -> Iterator[Lowered | Fault]:
        ids = {*self._sequences, *self._at_work}
        self._free_with_cache(ids)
        yield Lowered(self._engine.model.level, plain(reason))
        for id in sorted(ids):
            yield Fault("lost", "The target fell to a lower level: start the sequence again.", id)

    def _prefilled(self, sequence: TargetSequence) -> Prefilled:
        self._saving.add(sequence)
        self._saving_seconds = 0.0
        return Prefilled(
            sequence.start.request,
            sequence.round,
            sequence.evaluated,
            sequence.seconds,
            sequence.adopted,
            sequence.warning[:4000],
            self._pacer.take(),
        )

    def _release(self, name: str) -> None:
        sequences = (*self._sequences.values(), *self._ended.values())
        for kv in (*(sequence.kv for sequence in sequences), *self._prefix_sharing.cached):
            if kv.checkpoint is not None:
                kv.checkpoint.release(name)

    def _start(self, start: Start) -> Iterator[WorkerReply]:
        earlier = self._sequences.get(start.request)
        telling = start.sampling.prompt_logprobs
        repeated = earlier is not None and earlier.start == start and earlier.round == start.round
        if earlier is not None and repeated and earlier.prefilling:
            return
        if earlier is not None and repeated and not telling:
            yield self._prefilled(earlier)
            return
        continued = None if telling or earlier is not None else self._continued(start.tokens[:-1])
        for id in list(self._ended):
            # The KV is wanted now, saved or not.
            if self._prefix_sharing.on or id == start.request:
                yield from self._cache(id)
        if telling:
            # What was told of the prompt may be lost, so all of it is evaluated again.
            yield from self._end(start.request)
            if start.request in self._ended:
                yield from self._cache(start.request)
            earlier = None
        self._remove(start.request)
        if self._rings is not None:
            self._rings.started()
        if refusal := self._engine.refusal(start):
            yield Fault("refused", refusal, start.request)
            return
        try:
            processors = self._engine.processors(start)
        except GrammarError as error:
            yield Fault("refused", plain(str(error)), start.request)
            return
        began = self._clock()
        if earlier is None:
            shared = self._prefix_sharing.shared(start.tokens[:-1])
            found = None if telling else continued or self._prefix_sharing.find(start.tokens[:-1])
            sequence = self._engine.open(start, processors, found)
            sequence.branch = shared
            if found is not None and found.exclusive:
                self._saving.drop(sequence)
                self._disk.settle(sequence.cache)
        else:
            sequence = self._engine.reopen(earlier, start, processors)
        sequence.seconds = self._clock() - began if sequence.adopted else 0.0
        self._sequences[start.request] = sequence
        self._prefix_sharing.fit()
        if not telling:
            self._disk.read(sequence)
        if not sequence.prefilling:
            yield self._prefilled(sequence)

    def _verify(self, trees: Sequence[Verify]) -> Iterator[WorkerReply]:
        """One forward over all trees that need one; the others are answered at once."""
        valid: dict[RequestId, Verify] = {}
        for verify in trees:
            answer = None if verify.request in valid else self._without_forward(verify)
            if answer is None:
                # Of two trees of one sequence the last one counts.
                valid[verify.request] = verify
            else:
                yield from answer
        self._at_work = tuple(valid)
        begun = self._take_begun(valid)
        if begun is not None:
            yield from self._end_round(begun, valid)
        held = {} if begun is None else begun.sequences
        rest = [(self._sequences[id], ProposedTree(verify)) for id, verify in valid.items() if id not in held]
        if rest:
            yield from self._end_round(self._forward(rest), valid)

    def _end_round(self, forward: _Forward, asked: Mapping[RequestId, Verify]) -> Iterator[WorkerReply]:
        """Answer the trees of a forward, and commit what is accepted."""
        sequences, picks, behind = [sequence for sequence, _ in forward.proposals], forward.picks, None
        if self._may_chain(forward, asked):
            picks = picks or self._engine.begin_picks(forward.logits, sequences)
            behind = self._engine.begin_behind(picks, sequences)
        if picks:
            walks = self._engine.read(picks, forward.logits, sequences)
        else:
            walks = self._engine.walks(forward.logits, forward.proposals)
        parts = [PacedPart(len(tree.tokens), served.position) for served, tree in forward.proposals]
        self._pacer.forward(forward.began, parts)
        now = self._clock()
        answers: list[Verdict | Fault] = []
        for (sequence, proposal), walk in zip(forward.proposals, walks, strict=True):
            verify = asked[sequence.start.request]
            if isinstance(walk, GrammarError):
                answers.append(refused(verify, plain(str(walk))))
                continue
            path, paced, seconds = proposal.path(walk.accepted), self._pacer.take(), now - forward.began
            alone, told = len(proposal.tokens) < len(verify.tokens), walk.token_logprobs
            saving, self._saving_seconds = self._saving_seconds, 0.0
            answers.append(Verdict(verify.request, verify.round, path, walk.bonus, seconds, paced, told, alone, saving))
        yield from answers
        # The verdicts are sent, so the commits delay nothing.
        going: list[RequestId] = []
        for (sequence, proposal), walk, answer in zip(forward.proposals, walks, answers, strict=True):
            if isinstance(walk, Acceptance) and isinstance(answer, Verdict):
                del self._interrupted[answer.request]
                root = sequence.position
                sequence.advance(proposal, walk, answer, kept=behind is not None)
                if behind is None:
                    # Chained rounds draw theirs with the forward, which spares the device a command.
                    self._engine.draw_ahead(sequence)
                if root // _FIT_TOKENS != sequence.position // _FIT_TOKENS:
                    self._prefix_sharing.fit()
                yield from self._features(sequence, root, (0, *walk.accepted))
                self._saving.add(sequence)
                goes_on = self._goes_on(sequence, asked[answer.request]) and not walk.waited
                if goes_on and walk.bonus not in sequence.start.eos_tokens:
                    going.append(answer.request)
        if behind is not None:
            self._begun = _Forward([(each, each.root_alone()) for each in sequences], *behind, now)
            if len(going) < len(sequences):
                self._undo(self._begun.sequences.keys() - set(going))
        elif self._begun is None and not self._other_work:
            self._due += tuple(going)

    def _features(
        self, sequence: TargetSequence, first: int, entries: Sequence[int] | None = None
    ) -> Iterable[Announcement]:
        """See `FeatureRings.written`."""
        return () if self._rings is None else self._rings.written(sequence, first, entries)

    def _forward(self, proposals: list[Proposal]) -> _Forward:
        """Begin a forward over these trees."""
        began = self._clock()
        return _Forward(proposals, self._engine.begin_forward(proposals), [], began)

    def _take_begun(self, ids: Collection[RequestId]) -> _Forward | None:
        """These sequences' part of the forward that has begun; it is to be answered."""
        begun = self._begun
        taken = begun and begun.part(ids)
        if begun is not None and taken is not None:
            self._begun = None if taken is begun else begun.part(begun.sequences.keys() - set(ids))
        return taken

    def _undo(self, ids: Collection[RequestId]) -> None:
        """Undo these sequences' part of the forward that has begun."""
        taken = self._take_begun(ids)
        for sequence, _ in () if taken is None else taken.proposals:
            sequence.undo()

    def _goes_on(self, sequence: TargetSequence, verify: Verify) -> bool:
        """Whether the forward over the sequence's root may begin before its Verify, which follows this one."""
        return verify.plain_next and sequence.position < self._engine.model.context

    def _may_chain(self, forward: _Forward, asked: Mapping[RequestId, Verify]) -> bool:
        """Whether the next round's forward can begin before the tokens that this one gives are read. Other work goes
        first."""
        return (
            forward.sequences.keys() == asked.keys()
            and self._begun is None
            and not self._other_work
            and all(
                len(proposal.tokens) == 1
                and asked[sequence.start.request].plain_next
                and sequence.position + 1 < self._engine.model.context
                and self._engine.chains(sequence)
                for sequence, proposal in forward.proposals
            )
        )

    def _without_forward(self, verify: Verify) -> tuple[FromWorker, ...] | None:
        """The answer to a tree that is not to be evaluated, which may be empty; None for a tree that is."""
        sequence = self._sequences.get(verify.request)
        if sequence is None:
            return (Fault("lost", "The target does not know this sequence.", verify.request),)
        if verify.round < sequence.round:
            # Sent again, because the answer was lost or slow. Rounds before the last one need no answer.
            last = sequence.verdict
            return (last,) if last is not None and last.round == verify.round else ()
        if difference := out_of_step(sequence, verify):
            return (Fault("lost", difference, verify.request),)
        model = self._engine.model
        if refusal := flaw(verify, model.context, model.level):
            return (refused(verify, refusal),)
        return None

    def _end(self, id: RequestId) -> Iterator[KvCut]:
        """The sequence has ended: other sequences may use its KV, once the rest of it is saved to shared memory."""
        self._begun_again.discard(id)
        del self._interrupted[id]
        sequence = self._remove(id)
        if sequence is not None:
            self._disk.keep(sequence)
            sequence.ended = True
            self._ended[id] = sequence
            self._saving.add(sequence)
            if not self._saving.saves(id):
                yield from self._cache(id)

    def _continued(self, tokens: Sequence[int]) -> Found[TargetKv] | None:
        """The KV of an ended sequence that `tokens` continue, if the prefix cache, which may cut it, has it not yet."""
        for id, sequence in self._ended.items() if self._prefix_sharing.on else ():
            shared = sequence.cache.reach(shared_tokens(sequence, tokens))
            if shared >= MIN_SHARED_TOKENS > sequence.prefilled - shared:
                del self._ended[id]
                return Found(sequence.kv, shared, exclusive=True)
        return None

    def _cache(self, id: RequestId) -> Iterator[KvCut]:
        """Let the prefix cache have an ended sequence."""
        sequence = self._ended.pop(id)
        cut = self._prefix_sharing.end(sequence)
        covered = 0 if sequence.checkpoint is None else sequence.checkpoint.covered
        if cut is not None and max(cut.kept, covered) + MIN_SHARED_TOKENS <= cut.tokens:
            yield KvCut(max(cut.kept, covered), cut.tokens, cut.memory)

    def _free_with_cache(self, ids: Iterable[RequestId]) -> bool:
        """Remove these sequences, whose KV is of no use, and that of ended ones; whether the prefix cache had any."""
        self._due = ()
        for id in ids:
            sequence = self._remove(id)
            if sequence is not None:
                sequence.kv.close()
        for id in list(self._ended):
            self._saving.discard(id)
            self._ended.pop(id).kv.close()
        spared = self._prefix_sharing.clear()
        gc.collect()
        mx.clear_cache()
        return spared

    def _remove(self, id: RequestId) -> TargetSequence | None:
        """Remove a sequence. Its checkpoint stays."""
        self._saving.discard(id)
        self._disk.discard(id)
        self._undo((id,))
        sequence = self._sequences.pop(id, None)
        if self._rings is not None:
            self._rings.end(id)
        return sequence


def _token_logprobs(sequence: TargetSequence, first: int) -> Iterator[PromptLogprobs]:
    """Tell what the last chunk found, from the prompt's token `first` + 1 on."""
    told, sequence.told = sequence.told, []
    for begin in range(0, len(told), MAX_NODES):
        some = tuple(told[begin : begin + MAX_NODES])
        yield PromptLogprobs(sequence.start.request, sequence.round, first + begin, some)


def too_little(tokens: int, others: int) -> str:
    """That memory does not suffice, as a sentence. `tokens`: of the sequence that ends; `others`: live beside it."""
    beside = f" beside {others} other{'s' if others > 1 else ''}" if others else ""
    return (
        f"The target's memory does not suffice for this request, with {tokens:,} tokens so far{beside}: shorten it, or "
        "start the pipeline with a smaller --context, fewer --concurrent requests or --kv-bits 8."
    )


def refused(verify: Verify, text: str) -> Fault:
    """The answer to a tree that can't be evaluated."""
    return Fault("refused", text, verify.request, len(verify.tokens) - 1)


def out_of_step(sequence: TargetSequence, verify: Verify) -> str | None:
    """How the sequence differs from the one in the message, as a sentence; None if it does not."""
    if sequence.prefilling:
        return "The target is still prefilling this sequence."
    held = (sequence.round, sequence.position, sequence.root, sequence.tokens[-1])
    sent = (verify.round, verify.position, verify.root, verify.tokens[0])
    if held != sent:
        return f"The target is at round {held[0]}, position {held[1]}; the message is for {sent[0]}, {sent[1]}."
    return None


class KvSaving:
    """The sequences whose KV is to be saved to shared memory, a slice at a time, in turns. Offers what it has saved."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiting: dict[RequestId, TargetSequence] = {}

    @property
    def next(self) -> RequestId | None:
        """The sequence of the next slice; None if all is saved."""
        return next(iter(self._waiting), None)

    def add(self, sequence: TargetSequence) -> None:
        """Save the sequence's committed tokens, if it has unsaved ones: those of one that goes on once its checkpoint
        is prepared."""
        if sequence.unsaved and (sequence.ended or self._prepared(sequence)):
            self._waiting.setdefault(sequence.start.request, sequence)

    def _prepared(self, sequence: TargetSequence) -> bool:
        assert sequence.checkpoint is not None, "it has something to save"
        try:
            return sequence.checkpoint.prepared(sequence.prefilled)
        except SegmentError:
            # To save says so.
            return True

    def saves(self, id: RequestId) -> bool:
        return id in self._waiting

    def discard(self, id: RequestId) -> None:
        self._waiting.pop(id, None)

    def drop(self, taker: TargetSequence) -> None:
        """This sequence has taken over the KV of another one, which is to be saved no more for that one."""
        self._waiting = {
            id: each for id, each in self._waiting.items() if each is taker or each.cache is not taker.cache
        }

    def save(self) -> Iterator[KvOffer]:
        """Save the next slice."""
        id, sequence = next(iter(self._waiting.items()))
        del self._waiting[id]
        if sequence.checkpoint is None or not sequence.unsaved:
            return
        began = self._clock()
        try:
            saved = sequence.checkpoint.save(sequence.cache)
        except SegmentError as error:
            log.warning("sequence %d is not saved: %s", id, error)
            sequence.checkpoint.close()
            return
        self.add(sequence)
        if saved is None or (sequence.ended and self.saves(id) and saved.name == sequence.checkpoint.offered):
            # Of an ended sequence all is offered at once, with its tokens.
            return
        sequence.checkpoint.offered = saved.name
        tokens = tuple(sequence.tokens[: saved.tokens]) if sequence.ended else ()
        yield KvOffer(id, saved.name, saved.tokens, sequence.checkpoint.size, self._clock() - began, tokens)
