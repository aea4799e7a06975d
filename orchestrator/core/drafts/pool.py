"""All drafts of one pipeline: who is told of what, whose growth counts, who takes over from whom. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec import structs

from orchestrator.core.commands import Command, SendMessage
from orchestrator.core.drafts.election import DraftStatus, Election
from orchestrator.core.drafts.experience import DraftHistories, DraftHistory
from orchestrator.core.drafts.trial import Trial, TrialSequence
from orchestrator.core.events import Request, WorkerUp
from orchestrator.core.policy.decision import Strategy, patience_with
from orchestrator.core.policy.estimates import Estimates
from orchestrator.core.sequence import Phase, Sequence
from orchestrator.core.speculation import Speculation
from orchestrator.core.worker_registry import WorkerRegistry
from protocol.messages.base import SequenceId
from protocol.messages.worker import Fault, Grow, Hello, KvOffer, Prefilled, Stop, Verify

_READING_SECONDS = 10.0
"""A draft that reads a prompt says nothing for a while; after so long it counts as silent all the same."""


@dataclass(slots=True)
class _Draft:
    hello: Hello
    experience: DraftHistory
    told: dict[SequenceId, int] = field(default_factory=dict)
    """Sequences it serves, and the round at which it was told to start."""
    reading: set[SequenceId] = field(default_factory=set)
    """Those of them for which nothing has come yet."""
    owes_since: float | None = None
    """When it should have grown something that the target had use for."""


class DraftPool:
    """One draft drafts; at most one more is tried out beside it; the others are told of nothing."""

    def __init__(self, strategy: Strategy, sequences: Mapping[SequenceId, Sequence], workers: WorkerRegistry) -> None:
        self._strategy = strategy
        self._sequences = sequences
        self._workers = workers
        self._election = Election()
        self._experiences = DraftHistories()
        self._drafts: dict[int, _Draft] = {}
        self._trial: Trial | None = None
        self._leader: int | None = None
        """Whose growth the sequences hold."""

    @property
    def full(self) -> bool:
        return self._election.full

    @property
    def warnings(self) -> int:
        """Arenas that a draft refused to rely on."""
        return self._experiences.warnings

    def standings(self) -> dict[int, DraftStatus]:
        return self._election.standings()

    def estimates(self, request: Request) -> Estimates:
        """What a new sequence goes by."""
        return self._experience(self._leader).of(request)

    # Drafts come and go -----------------------------------------------------------------------

    def joined(self, event: WorkerUp, now: float) -> list[Command]:
        commands = self.left(event.incarnation, now)
        self._drafts[event.incarnation] = _Draft(event.hello, self._experiences.take(event.hello))
        self._election.joined(event.incarnation)
        return [*commands, *self._settle(now)]

    def left(self, incarnation: int, now: float) -> list[Command]:
        """It is gone; the best of the others goes on in its place."""
        draft = self._drafts.pop(incarnation, None)
        if draft is None:
            return []
        self._election.left(incarnation)
        return [*self._experiences.give_back(draft.hello, draft.experience), *self._settle(now)]

    def distrusted(self, sequence: Sequence, now: float) -> list[Command]:
        """The target can't take what the draft grew for this sequence."""
        if self._leader is None:
            return []
        if self._election.failed():
            return self._settle(now)
        return self._stop(self._leader, sequence.id)

    # Sequences come, move on and go -----------------------------------------------------------

    def begin(self, sequence: Sequence, now: float) -> list[Command]:
        """Tell of a sequence that the target serves, unless that was done."""
        if sequence.phase is Phase.QUEUED:
            return []
        return [
            command for id in self._active() for command in self._start(id, self._of(id, sequence, now), sequence, now)
        ]

    def sent(self, sequence: Sequence, now: float) -> None:
        """The target has begun a round."""
        if self._trial is not None and not self._alone:
            self._trial.sent(sequence, now)

    def follow(
        self, sequence: Sequence, tokens: list[int], asked: Verify, waited: float, hit: bool, now: float
    ) -> list[Command]:
        """The answer to `asked`, which waited so long for growth, has moved the root by `tokens`: so do the drafts."""
        if self._leader is None:
            return []
        commands = self._reroot(self._leader, sequence.speculation, sequence, tokens, hit, now)
        if self._trial is not None:
            shadow = self._trial.shadows[sequence.id]
            estimates = sequence.estimates
            seconds = estimates.target(len(asked.tokens)) + estimates.hop.get(0.0) + (waited if self._alone else 0.0)
            found = self._trial.follow(sequence, tokens, seconds, now, self._alone)
            commands += self._reroot(self._trial.incarnation, shadow.speculation, sequence, tokens, found, now)
        return [*commands, *self._compare(sequence, hit, now)]

    def ended(self, sequence: SequenceId) -> list[Command]:
        """A sequence is over."""
        self._experiences.ended(sequence)
        if self._trial is not None:
            self._trial.shadows.pop(sequence, None)
        return [command for id in self._drafts for command in self._stop(id, sequence)]

    # What drafts say --------------------------------------------------------------------------

    def grew(self, incarnation: int, growth: Grow, now: float) -> bool:
        """Whether the growth was of any use."""
        sequence = self._sequences.get(growth.sequence)
        if sequence is None or incarnation not in self._active():
            return False
        speculation = self._of(incarnation, sequence, now)
        if not speculation.wanted:
            return False
        draft = self._drafts[incarnation]
        draft.owes_since = None
        draft.reading.discard(growth.sequence)
        if growth.distributions and sequence.request.sampling.verification != "rejection":
            # Nobody will ask for them, and they are the largest thing that a draft can send.
            growth = structs.replace(growth, distributions=())
        speculation.merge(growth, self._workers.vocabulary, now)
        if incarnation == self._leader:
            sequence.tally.growth(growth.evaluated, growth.seconds)
            sequence.tally.pace(growth.paced)
        elif self._trial is not None:
            self._trial.grew(sequence, now, self._alone)
        return True

    def refused(self, incarnation: int, fault: Fault, sequence: Sequence, now: float) -> list[Command]:
        """A draft has lost a sequence, or can't serve it."""
        draft = self._drafts[incarnation]
        if incarnation not in self._active() or sequence.id not in draft.told:
            return []
        told = draft.told.pop(sequence.id)
        draft.reading.discard(sequence.id)
        speculation = self._of(incarnation, sequence, now)
        speculation.drafting = False
        speculation.wanted = speculation.wanted and fault.kind == "lost"
        # Once a round is enough for one that loses it again and again.
        return self._start(incarnation, speculation, sequence, now) if told < sequence.round else []

    def offered(self, incarnation: int, offer: KvOffer) -> None:
        """A draft keeps a sequence's KV where its next life finds it."""
        self._drafts[incarnation].experience.caches.offered(offer, live=offer.sequence in self._sequences)

    def adopted(self, incarnation: int, message: Prefilled) -> None:
        """What a draft need not read, or why it has to: KV that an earlier life left, or that other requests did."""
        self._drafts[incarnation].experience.caches.adopted(message)
        sequence = self._sequences.get(message.sequence)
        if sequence is not None and incarnation == self._leader:
            sequence.speculation.reads(message.tokens)

    # ------------------------------------------------------------------------------------------

    @property
    def _alone(self) -> bool:
        """Rounds of several requests overlap: what one of them waits is no loss."""
        return len(self._sequences) == 1

    @property
    def _sharing(self) -> int:
        """Requests that a draft grows."""
        return max(1, sum(sequence.phase is not Phase.QUEUED for sequence in self._sequences.values()))

    def _active(self) -> list[int]:
        trial = [] if self._trial is None else [self._trial.incarnation]
        return trial if self._leader is None else [self._leader, *trial]

    def _experience(self, incarnation: int | None) -> DraftHistory:
        return self._experiences.without_draft if incarnation is None else self._drafts[incarnation].experience

    def _of(self, incarnation: int, sequence: Sequence, now: float) -> Speculation:
        """What an active draft grows for a sequence."""
        if self._trial is not None and incarnation == self._trial.incarnation:
            return self._shadow(self._trial, sequence, now).speculation
        return sequence.speculation

    def _shadow(self, trial: Trial, sequence: Sequence, now: float) -> TrialSequence:
        shadow = trial.shadows.get(sequence.id)
        if shadow is None:
            # Where nothing has been verified yet, both drafts begin with the prompt.
            shadow = TrialSequence(self._fresh(trial.incarnation, sequence, now), compared=sequence.tally.rounds == 0)
            trial.shadows[sequence.id] = shadow
        return shadow

    def _fresh(self, incarnation: int, sequence: Sequence, now: float) -> Speculation:
        estimates = self._experience(incarnation).of(sequence.request)
        return Speculation(
            sequence.cache.root.id, sequence.tokens[-1], sequence.position, estimates, self._strategy.drafts, now
        )

    def _settle(self, now: float) -> list[Command]:
        """Do what the election's outcome asks for: hand over, stop, start."""
        leader, newcomer = self._election.drafting, self._election.on_trial
        grown = {} if self._trial is None else {self._trial.incarnation: self._trial.shadows}
        changed = leader != self._leader
        if changed:
            if self._leader is not None:
                grown[self._leader] = {
                    one.id: TrialSequence(one.speculation, compared=True) for one in self._sequences.values()
                }
            self._leader = leader
            ready = {} if leader is None else grown.get(leader, {})
            for sequence in self._sequences.values():
                self._hand_over(sequence, ready.get(sequence.id), now)
        if newcomer is None:
            self._trial = None
        elif changed or self._trial is None or self._trial.incarnation != newcomer:
            self._trial = Trial(newcomer, self._strategy, grown.get(newcomer))
        commands = [command for sequence in self._sequences.values() for command in self.begin(sequence, now)]
        idle = [id for id in self._drafts if id not in self._active()]
        return [
            *commands,
            *(stop for id in idle for told in list(self._drafts[id].told) for stop in self._stop(id, told)),
        ]

    def _hand_over(self, sequence: Sequence, ready: TrialSequence | None, now: float) -> None:
        """Go on with what the new draft has grown so far. Without a draft, the old growth is still good."""
        if self._leader is None:
            sequence.speculation.drafting = False
        elif ready is not None:
            sequence.speculation = ready.speculation
        else:
            sequence.speculation = self._fresh(self._leader, sequence, now)

    def _start(self, id: int, speculation: Speculation, sequence: Sequence, now: float) -> list[Command]:
        draft, vocabulary = self._drafts[id], self._workers.vocabulary
        unwanted = not speculation.wanted or speculation.estimates.usefulness.resting
        if not vocabulary or unwanted or sequence.id in draft.told:
            return []
        draft.told[sequence.id] = sequence.round
        draft.reading.add(sequence.id)
        plan = self._strategy.plan(speculation.estimates, self._sharing)
        adopt = draft.experience.caches.find(sequence.id)
        speculation.start(len(sequence.tokens) - (adopt.tokens if adopt else 0), now)
        return [SendMessage("draft", sequence.start(plan, vocabulary, adopt), id)]

    def _stop(self, id: int, sequence: SequenceId) -> list[Command]:
        draft = self._drafts[id]
        draft.reading.discard(sequence)
        draft.owes_since = None
        return [] if draft.told.pop(sequence, None) is None else [SendMessage("draft", Stop(sequence), id)]

    def _reroot(
        self, id: int, speculation: Speculation, sequence: Sequence, tokens: list[int], hit: bool, now: float
    ) -> list[Command]:
        draft = self._drafts[id]
        if speculation.estimates.usefulness.resting:
            speculation.drafting = False
            return self._stop(id, sequence.id)
        if sequence.id not in draft.told:
            return self._start(id, speculation, sequence, now)
        if not hit and draft.owes_since is None:
            draft.owes_since = now
        plan = self._strategy.plan(speculation.estimates, self._sharing)
        return [SendMessage("draft", sequence.reroot(tokens, not hit, plan), id)]

    def _compare(self, sequence: Sequence, hit: bool, now: float) -> list[Command]:
        """After a round: replace a silent draft, end a trial that has seen enough, begin one that is due."""
        assert self._leader is not None
        before = self._leader, self._election.on_trial
        outcome = None if self._trial is None else self._trial.outcome(self._election.contested)
        self._election.round_over()
        if self._silent(self._drafts[self._leader], sequence, now):
            self._election.failed()
        elif outcome is not None:
            self._election.judged(outcome)
        after = self._election.drafting, self._election.on_trial
        return [] if before == after else self._settle(now)

    def _silent(self, draft: _Draft, sequence: Sequence, now: float) -> bool:
        if draft.owes_since is None:
            return False
        patience = _READING_SECONDS if draft.reading else patience_with(sequence.estimates)
        return now - draft.owes_since > patience
