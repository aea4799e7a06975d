"""The orchestrator's state machine: one event and the time in, commands out.

Knows no sockets, clocks, processes or randomness; the same events at the same times give the same
commands. It owns the promise that a request's tokens are the target's own, whatever workers do.
"""

from typing import Literal, assert_never

from orchestrator.core.admission import refusal
from orchestrator.core.commands import Command, Dismiss, Emit, Finish, Reject, SendMessage
from orchestrator.core.drafts.election import MOST_DRAFTS, DraftStatus
from orchestrator.core.drafts.pool import DraftPool
from orchestrator.core.events import Arrived, Ended, Event, Submitted, Tick, WorkerDown, WorkerUp
from orchestrator.core.kv.prefill_router import PrefillRouter
from orchestrator.core.options import Options
from orchestrator.core.places import Places
from orchestrator.core.policy.strategies import STRATEGIES
from orchestrator.core.response_timeouts import AWAITING_ANSWER, Remedy, ResponseTimeouts
from orchestrator.core.scheduler import Scheduler
from orchestrator.core.sequence import Phase, Sequence, truncated
from orchestrator.core.worker_registry import WorkerRegistry
from protocol.messages.base import Role, SequenceId
from protocol.messages.worker import Fault, Forest, Grow, Hello, KvOffer, Prefilled, Stop, Verdict, Verify


class Machine:
    """All requests of one pipeline. One round of the target serves all of them that are ready for it."""

    def __init__(self, options: Options, profile: str = "") -> None:
        """`profile`: name of the device whose pace the workers keep to, if any."""
        self._profile = profile
        self.strategy = STRATEGIES[options.strategy](options)
        self.sequences: dict[SequenceId, Sequence] = {}
        self.stale = 0
        """Messages that were not acted on: another life, an old round, an unknown sequence."""
        self._workers = WorkerRegistry()
        self.handoff = PrefillRouter(options)
        self._places = Places(options.concurrent, options.turn)
        self._turns = Scheduler(self.strategy)
        self._debts = ResponseTimeouts(self.sequences, self._workers)
        self.drafting = DraftPool(self.strategy, self.sequences, self._workers)

    def step(self, event: Event, now: float) -> list[Command]:
        """Fold one event into the state; return what the shell must now do, in this order."""
        match event:
            case Submitted():
                return self._on_submitted(event, now)
            case Ended():
                return self._on_ended(event, now)
            case WorkerUp():
                return self._on_worker_up(event, now)
            case WorkerDown():
                return self._on_worker_down(event, now)
            case Arrived():
                return self._on_arrived(event, now)
            case Tick():
                return self._on_tick(now)
            case _:
                assert_never(event)

    def standings(self) -> dict[int, DraftStatus]:
        """Of every draft that is up, by its incarnation."""
        return self.drafting.standings()

    def present(self) -> list[tuple[int, Hello, bool]]:
        """Each worker that is up: incarnation, what it said of itself, whether it is a guest's."""
        return self._workers.everyone()

    @property
    def under_verification(self) -> frozenset[SequenceId]:
        """Sequences whose trees the target's present forward is about."""
        return self._turns.unanswered

    def deadline(self) -> float | None:
        """When the next Tick is due at the latest; None if nothing is waited for."""
        due = (self._debts.deadline(), self._turns.wake_at, self.handoff.deadline())
        return min((at for at in due if at is not None), default=None)

    # Requests ---------------------------------------------------------------------------------

    def _on_submitted(self, event: Submitted, now: float) -> list[Command]:
        estimates = self.drafting.estimates(event.request)
        sequence = Sequence(event.sequence, event.request, estimates, self.strategy.drafts, now)
        self.sequences[sequence.id] = sequence
        self._turns.join(sequence.id)
        if not self._places.ask(sequence.id):
            sequence.phase = Phase.QUEUED
            return []
        return self._start(sequence, now)

    def _on_ended(self, event: Ended, now: float) -> list[Command]:
        sequence = self.sequences.get(event.sequence)
        if sequence is None:
            return []
        sequence.tally.generated -= event.surplus
        return [*self._finish(sequence, event.reason, now), *self._schedule(now)]

    def _finish(self, sequence: Sequence, reason: Literal["stop", "length", "cancelled"], now: float) -> list[Command]:
        statistics = sequence.tally.statistics(now, self.strategy.drafts, self.strategy.caches, self._profile)
        return [*self._forget(sequence, now), Finish(sequence.id, reason, statistics)]

    def _forget(self, sequence: Sequence, now: float) -> list[Command]:
        del self.sequences[sequence.id]
        self._turns.leave(sequence.id)
        stopped = self._stop(sequence)
        return [*stopped, *self._admit(self._places.leave(sequence.id), now)]

    def _stop(self, sequence: Sequence) -> list[Command]:
        """No worker serves it any more."""
        given_up = self.handoff.ended(sequence)
        told: list[Command] = [
            SendMessage(role, Stop(sequence.id)) for role in ("target", "prefill") if role in self._workers
        ]
        return [*told, *given_up, *self.drafting.ended(sequence.id)]

    def _admit(self, id: SequenceId | None, now: float) -> list[Command]:
        """This one has got a place."""
        if id is None:
            return []
        self.sequences[id].phase = Phase.PREFILLING
        return self._start(self.sequences[id], now)

    def _take_turns(self, sequence: Sequence, tokens: int, now: float) -> list[Command]:
        """After so many more tokens: make room, if it is another one's turn."""
        successor = self._places.advanced(sequence.id, tokens)
        if successor is None:
            return []
        sequence.queue()
        return [*self._stop(sequence), *self._admit(successor, now)]

    # Workers ----------------------------------------------------------------------------------

    def _on_worker_up(self, event: WorkerUp, now: float) -> list[Command]:
        match event.hello.role:
            case "draft":
                return self._on_draft_up(event, now)
            case "prefill":
                self._workers.join(event, now)
                self.handoff.joined()
                return []
            case "target":
                commands: list[Command] = []
                for draft, mismatch in self._workers.mismatches(event.hello).items():
                    commands += [
                        Dismiss("draft", draft, mismatch),
                        *self._on_worker_down(WorkerDown("draft", draft), now),
                    ]
                self._workers.join(event, now)
                return [*commands, *(c for one in self._served() for c in self._start(one, now))]

    def _on_draft_up(self, event: WorkerUp, now: float) -> list[Command]:
        mismatch = self._workers.mismatch(event.hello)
        if mismatch is None and self.drafting.full:
            mismatch = f"{MOST_DRAFTS} drafts are attached, which is the most: detach one of them first."
        if mismatch is not None:
            return [Dismiss("draft", event.incarnation, mismatch)]
        self._workers.join(event, now)
        return self.drafting.joined(event, now)

    def _on_worker_down(self, event: WorkerDown, now: float) -> list[Command]:
        if not self._workers.leave(event):
            return []
        match event.role:
            case "prefill":
                return self.handoff.left(now)
            case "draft":
                return [*self.drafting.left(event.incarnation, now), *self._schedule(now)]
            case "target":
                for sequence in self._served():
                    sequence.phase = Phase.PREFILLING
                    sequence.outstanding = None
                self._turns.target_gone()
                return []

    def _start(self, sequence: Sequence, now: float) -> list[Command]:
        """Tell the target of a sequence, if there is one, and then the drafts that can be of use."""
        target = self._workers.target
        if target is None:
            return []
        reason = refusal(sequence.request, target, self._workers.chosen_draft)
        if reason is not None:
            return [*self._forget(sequence, now), Reject(sequence.id, reason)]
        sequence.fit(target.context)
        sequence.outstanding = None
        return [self.handoff.begin(sequence, now), *self.drafting.begin(sequence, now)]

    # Messages ---------------------------------------------------------------------------------

    def _on_arrived(self, event: Arrived, now: float) -> list[Command]:
        if not self._workers.hear(event, now):
            return self._drop()
        match event.role, event.message:
            case "target", Verdict() as verdict:
                return self._on_verdict(verdict, now)
            case "target", Prefilled() as prefilled:
                return self._on_prefilled(prefilled, now)
            case "draft", Grow() as growth:
                useful = self.drafting.grew(event.incarnation, growth, now)
                return self._schedule(now) if useful else self._drop()
            case "draft", KvOffer() as offer:
                self.drafting.offered(event.incarnation, offer)
                return []
            case "draft", Prefilled() as adopted:
                self.drafting.adopted(event.incarnation, adopted)
                return []
            case "target" | "prefill" as role, KvOffer() as offer:
                return self.handoff.offered(role, self.sequences.get(offer.sequence), offer, now)
            case _, Fault() as fault:
                return self._on_fault(event.role, event.incarnation, fault, now)
            case _:
                return []

    def _on_prefilled(self, message: Prefilled, now: float) -> list[Command]:
        sequence = self.sequences.get(message.sequence)
        if sequence is None or sequence.phase is not Phase.PREFILLING or message.round != sequence.round:
            return self._drop()
        if message.tokens + message.adopted > sequence.position:
            return self._drop()
        sequence.phase = Phase.FREE
        sequence.free_since = now
        sequence.tally.prefill_seconds += message.seconds
        sequence.tally.pace(message.paced)
        sequence.tally.decoding(now)
        return [*self._schedule(now), *self.handoff.prefilled(sequence, message)]

    def _on_verdict(self, verdict: Verdict, now: float) -> list[Command]:
        sequence = self.sequences.get(verdict.sequence)
        if sequence is None or verdict.bonus >= self._workers.vocabulary or not sequence.accepts(verdict):
            return self._drop()
        asked = sequence.outstanding
        assert asked is not None
        width = self._turns.answered(sequence.id, now)
        sequence.learn(verdict)
        sequence.tally.pace(verdict.paced)
        if width is not None:
            sequence.estimates.target.observe(width, verdict.seconds)
        if len(self.sequences) == 1:
            # Rounds of several requests overlap and tell nothing about one.
            sequence.note_overhead(verdict, now)
        last = truncated(sequence.request, sequence.tokens_of(verdict), sequence.remaining)
        sequence.tally.tokens(len(last.tokens), now)
        if last.reason is not None:
            sequence.tokens += last.tokens
            emit = Emit(sequence.id, tuple(last.tokens), likelihoods=verdict.likelihoods[: len(last.tokens)])
            return [emit, *self._finish(sequence, last.reason, now), *self._schedule(now)]
        return self._commit(sequence, last.tokens, verdict, asked, now)

    def _commit(
        self, sequence: Sequence, tokens: list[int], verdict: Verdict, asked: Verify, now: float
    ) -> list[Command]:
        """Go on: the target first, then the drafts, then the client."""
        waited = sequence.waited
        outcome = sequence.commit(tokens, now)
        sequence.tally.outcome(outcome.hit)
        sequence.estimates.hits.observe(outcome.fan, outcome.guessed)
        commands = self._take_turns(sequence, len(tokens), now)
        commands += self._schedule(now)
        if sequence.phase is not Phase.QUEUED:
            commands += self.drafting.follow(sequence, tokens, asked, waited, outcome.hit, now)
        hit = outcome.hit if self.strategy.caches else None
        commands.append(Emit(sequence.id, tuple(tokens), hit, verdict.likelihoods))
        return commands

    def _on_fault(self, role: Role, incarnation: int, fault: Fault, now: float) -> list[Command]:
        sequence = None if fault.sequence is None else self.sequences.get(fault.sequence)
        if sequence is None:
            return self._drop()
        if role == "prefill":
            return self.handoff.failed(sequence.id, now)
        if role == "draft":
            return [*self.drafting.refused(incarnation, fault, sequence, now), *self._schedule(now)]
        stale = bool(fault.nodes) and not sequence.speculating
        if stale or sequence.phase not in AWAITING_ANSWER:
            # Of a tree that was asked about twice, the second refusal may come when it is no longer in question.
            return self._drop()
        self._turns.settled(sequence.id)
        if fault.kind == "refused" and fault.nodes:
            # The prompt was fine, so the tree is what the target can't take: this draft grows nonsense.
            told = self.drafting.distrusted(sequence, now) if sequence.distrust(now) else []
            return [*told, *self._schedule(now)]
        if fault.kind == "refused":
            return [*self._forget(sequence, now), Reject(sequence.id, fault.text), *self._schedule(now)]
        return [*self._start(sequence, now), *self._schedule(now)]

    def _drop(self) -> list[Command]:
        self.stale += 1
        return []

    # Time and turns ---------------------------------------------------------------------------

    def _on_tick(self, now: float) -> list[Command]:
        commands: list[Command] = []
        overdue = self._debts.overdue(now)
        replacement = self._debts.silent(now) if overdue else None
        if replacement is not None:
            return [replacement, *self.handoff.tick(now)]
        for sequence, remedy in overdue:
            match remedy:
                case Remedy.ASK_AGAIN:
                    commands.append(self.handoff.again(sequence))
                case Remedy.START_ANEW:
                    self._turns.settled(sequence.id)
                    commands += self._start(sequence, now)
        return [*commands, *self.handoff.tick(now), *self._schedule(now)]

    def _served(self) -> list[Sequence]:
        """Those that have a place."""
        return [sequence for sequence in self.sequences.values() if sequence.phase is not Phase.QUEUED]

    def _schedule(self, now: float) -> list[Command]:
        """Give the free target its next round."""
        if "target" not in self._workers:
            return []
        asked = self._turns.next(self.sequences, now)
        for verify in asked:
            self.drafting.sent(self.sequences[verify.sequence], now)
        if len(asked) < 2:
            return [SendMessage("target", verify) for verify in asked]
        return [SendMessage("target", Forest(tuple(asked)))]
