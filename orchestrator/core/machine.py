"""The orchestrator's state machine: one event and the time in, commands out.

It knows no sockets, clocks, processes or randomness; the same events at the same times give the same commands. It
guarantees that a request's tokens are the target's own, whatever workers do.
"""

from collections.abc import Iterable, Iterator
from typing import Literal, assert_never

from orchestrator.core.commands import Command, Dismiss, Emit, Finish, Pardon, Place, Reject, SendMessage, TellReading
from orchestrator.core.drafts.election import MAX_DRAFTS
from orchestrator.core.drafts.pool import DraftPool
from orchestrator.core.events import Arrived, Ended, Event, Submitted, Tick, WorkerDown, WorkerUp
from orchestrator.core.options import Options
from orchestrator.core.phases import AWAITING_TARGET, Phase, Trigger
from orchestrator.core.policy.strategies import STRATEGIES
from orchestrator.core.prefills import PrefillRouter
from orchestrator.core.scheduler import ResponseTimeouts, Scheduler
from orchestrator.core.sequence import Sequence
from orchestrator.core.workers import FeatureRelay, WorkerRegistry, refusal
from protocol.messages.base import Role, SequenceId
from protocol.messages.features import Features
from protocol.messages.kv import KvOffer
from protocol.messages.worker import (
    Fault,
    Forest,
    Grow,
    Hello,
    Lowered,
    Prefilled,
    Prefilling,
    PromptLikelihoods,
    Stop,
    Verdict,
)

_FATAL = (
    "Two targets ended while they computed this request, or did nothing for it, so it is not tried again. "
    "`launch-pipeline doctor` says whether memory or the model is the cause."
)
_SETTLING = 2
"""Rounds of a request that say nothing about what forwards cost: the target may copy KV that it took up and that
something else still holds. Behind 8,192 tokens such a forward takes six times as long."""


class Machine:
    """All requests of one pipeline. One forward of the target serves all of them that are ready."""

    def __init__(self, options: Options, profile: str = "") -> None:
        """`profile`: name of the device profile that paces the workers, if there is one."""
        self.strategy = STRATEGIES[options.strategy](options)
        self.sequences: dict[SequenceId, Sequence] = {}
        self.stale = 0
        """Messages that were ignored: of an incarnation that is gone, of an old round, of an unknown sequence."""
        self._workers = WorkerRegistry(options.context_limit)
        self.scheduler = Scheduler(self.strategy, options.concurrent, options.turn)
        self._timeouts = ResponseTimeouts(self.sequences, self._workers)
        self.prefills = PrefillRouter(options)
        self.drafts = DraftPool(self.strategy, self.sequences, self._workers, self.prefills.written, options.placement)
        self._shared: bool | None = None
        """Whether the workers compute on one device; None until a draft is active."""
        self._features = FeatureRelay(self.sequences, self._workers)
        self._profile = profile

    def step(self, event: Event, now: float) -> list[Command]:
        """Fold one event into the state; return what the runtime must now do, in this order."""
        return list(self.commands(event, now))

    def commands(self, event: Event, now: float) -> Iterable[Command]:
        """As `step`, but the commands after a verdict are computed one after the other.

        The target's next round comes first, and the target need not wait for the rest. The last command must be taken
        before the next event; while it is performed, the next event may be folded.
        """
        match event:
            case Submitted():
                return self._submit(event, now)
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

    def workers(self) -> list[tuple[int, Hello, bool]]:
        """Each worker that is up: its incarnation, its Hello, and whether it runs on another machine."""
        return self._workers.workers()

    @property
    def kv_warnings(self) -> int:
        """How often KV of other requests was offered and could not be used."""
        return self.prefills.warnings + self.drafts.warnings

    def deadline(self) -> float | None:
        """When the next Tick is due at the latest; None if no Tick is needed."""
        times = (self._timeouts.deadline(), self.scheduler.wake_at, self.prefills.deadline())
        return min((time for time in times if time is not None), default=None)

    # Requests ---------------------------------------------------------------------------------

    def _submit(self, event: Submitted, now: float) -> list[Command]:
        estimates = self.drafts.estimates(event.request, len(event.request.tokens))
        sequence = Sequence(event.sequence, event.request, estimates, self.strategy.drafts, now)
        self.sequences[sequence.id] = sequence
        return self._admit(sequence.id, now) if self.scheduler.add(sequence.id) else []

    def _on_ended(self, event: Ended, now: float) -> list[Command]:
        sequence = self.sequences.get(event.sequence)
        if sequence is None:
            return []
        sequence.stats.generated -= event.surplus
        return [*self._finish(sequence, event.reason, now), *self._schedule(now)]

    def _admit(self, id: SequenceId, now: float) -> list[Command]:
        """Start a request that got a place."""
        self.sequences[id].enter(Trigger.ADMIT)
        return self._start(self.sequences[id], now)

    def _start(self, sequence: Sequence, now: float) -> list[Command]:
        """Start a sequence on the target, if one is up, and on the drafts that are in use."""
        target = self._workers.target
        if target is None or (sequence.suspect and self._suspect_at_work(sequence)):
            return []
        reason = refusal(sequence.request, target)
        if reason is not None:
            return self._reject(sequence, reason, now)
        sequence.limit_to(target)
        sequence.outstanding = None
        return [self.prefills.begin(sequence, now), *self.drafts.begin(sequence, now)]

    def _suspect_at_work(self, besides: Sequence) -> bool:
        """Whether the target serves another request over which one may have ended. They are served one by one, so that
        the next death shows which one it is."""
        idle = (Phase.WAITING, Phase.ADMITTED)
        return any(one.suspect and one is not besides and one.phase not in idle for one in self.sequences.values())

    def _start_suspect(self, now: float) -> list[Command]:
        """Start the next of the suspects that wait for one another."""
        waiting = [one for one in self.sequences.values() if one.suspect and one.phase is Phase.ADMITTED]
        return self._start(waiting[0], now) if waiting else []

    def _stop(self, sequence: Sequence, now: float) -> list[Command]:
        """End a sequence on all workers."""
        releases = self.prefills.sequence_ended(sequence)
        stops: list[Command] = [
            SendMessage(role, Stop(sequence.id)) for role in ("target", "prefill") if role in self._workers
        ]
        return [*stops, *releases, *self.drafts.sequence_ended(sequence, now)]

    def _finish(self, sequence: Sequence, reason: Literal["stop", "length", "cancelled"], now: float) -> list[Command]:
        strategy, plain = self.strategy, sequence.plain_tokens_per_second()
        statistics = sequence.stats.statistics(now, strategy.drafts, strategy.caches, self._profile, plain)
        return [*self._forget(sequence, now), Finish(sequence.id, reason, statistics)]

    def _reject(self, sequence: Sequence, reason: str, now: float) -> list[Command]:
        """The target can't serve the request."""
        return [*self._forget(sequence, now), Reject(sequence.id, reason)]

    def _forget(self, sequence: Sequence, now: float) -> list[Command]:
        del self.sequences[sequence.id]
        successor = self.scheduler.remove(sequence.id)
        commands = [*self._stop(sequence, now), *([] if successor is None else self._admit(successor, now))]
        return [*commands, *self._start_suspect(now)]

    # Workers ----------------------------------------------------------------------------------

    def _on_worker_up(self, event: WorkerUp, now: float) -> list[Command]:
        match event.hello.role:
            case "draft":
                return self._on_draft_up(event, now)
            case "prefill":
                self._workers.add(event, now)
                self.prefills.worker_up()
                return []
            case "target":
                exchanged = self._workers.exchanged(event)
                if exchanged is not None:
                    return [Dismiss("target", event.incarnation, exchanged)]
                commands: list[Command] = []
                for draft, text in self._workers.target_mismatches(event.hello).items():
                    commands.append(Dismiss("draft", draft, text))
                    commands += self._on_worker_down(WorkerDown("draft", draft), now)
                self._workers.add(event, now)
                self.drafts.expect_target(event.hello)
                # Before the Starts, so that the prompts are recorded.
                self._features.target_changed()
                commands += self._features.tap()
                for sequence in self._running():
                    if sequence.phase is Phase.ADMITTED:
                        commands += self._start(sequence, now)
                return [*commands, *self.drafts.follow_target(now)]

    def _on_draft_up(self, event: WorkerUp, now: float) -> list[Command]:
        text = self._workers.draft_mismatch(event.hello)
        if text is None and self.drafts.full:
            text = f"{MAX_DRAFTS} drafts are attached, which is the most: detach one of them first."
        if text is not None:
            return [Dismiss("draft", event.incarnation, text)]
        self._workers.add(event, now)
        return [*self._features.tap(), *self.drafts.draft_up(event, now), *self._place()]

    def _on_worker_down(self, event: WorkerDown, now: float, known: bool = False) -> list[Command]:
        """`known`: the target is replaced for what it did to some requests, and not for one that was at work."""
        if not self._workers.remove(event):
            return []
        match event.role:
            case "prefill":
                return self.prefills.worker_down(now)
            case "draft":
                commands = [*self.drafts.draft_down(event.incarnation, now), *self._schedule(now)]
                return [*commands, *self._features.tap()]
            case "target":
                # All of them first: the successor of one that is rejected has no target either.
                running = self._running()
                fatal = [one for one in running if one.lose_target(not known and not self.prefills.adopting(one.id))]
                self.scheduler.lose_target()
                commands = self.prefills.target_down()
                culprits = bool(commands or fatal)
                for sequence in fatal:
                    commands += self._reject(sequence, _FATAL, now)
                return [*commands, Pardon()] if culprits else commands

    # Messages ---------------------------------------------------------------------------------

    def _on_arrived(self, event: Arrived, now: float) -> Iterable[Command]:
        if not self._workers.note_message(event, now):
            return self._drop()
        match event.role, event.message:
            case "target", Verdict() as verdict:
                return self._on_verdict(verdict, now)
            case "target", Lowered(level):
                lowered = self._workers.lower(event.incarnation, level)
                return self.drafts.follow_target(now) if lowered else self._drop()
            case "target", Prefilling() as prefilling:
                return self._on_prefilling(prefilling, now)
            case "target", PromptLikelihoods() as told:
                return self._on_prompt_likelihoods(told)
            case "target", Prefilled() as prefilled:
                return self._on_prefilled(prefilled, now)
            case "target", Features() as features:
                relayed = self._features.relay(features, self.drafts.feature_readers(features.sequence))
                return self._drop() if relayed is None else relayed
            case "draft", Grow() as growth:
                if self.drafts.merge_growth(event.incarnation, growth, now):
                    return self._schedule(now)
                return self.drafts.caught_up(event.incarnation, growth, now) or self._drop()
            case "draft", KvOffer() as offer:
                self.drafts.add_arena(event.incarnation, offer)
                return []
            case "draft", Prefilled() as adopted:
                self.drafts.note_adoption(event.incarnation, adopted)
                return []
            case "target" | "prefill" as role, KvOffer() as offer:
                return self._on_kv_offer(role, offer, now)
            case _, Fault() as fault:
                return self._on_fault(event.role, event.incarnation, fault, now)
            case _:
                return []

    def _on_kv_offer(self, role: Role, offer: KvOffer, now: float) -> list[Command]:
        sequence = self.sequences.get(offer.sequence)
        commands = self.prefills.add_arena(role, sequence, offer, now)
        # A draft that shares the target's KV may have waited for it.
        return commands if sequence is None else [*commands, *self.drafts.begin(sequence, now)]

    def _on_prefilling(self, message: Prefilling, now: float) -> list[Command]:
        sequence = self.sequences.get(message.sequence)
        if sequence is None or sequence.phase is not Phase.PREFILLING or message.round != sequence.round:
            return self._drop()
        if not sequence.read < message.tokens <= sequence.position:
            return self._drop()
        sequence.read = message.tokens
        self._timeouts.read_on(sequence, now)
        if not sequence.reading_is_due(now):
            return []
        return [TellReading(sequence.id, message.tokens, sequence.position)]

    def _on_prompt_likelihoods(self, message: PromptLikelihoods) -> list[Command]:
        sequence = self.sequences.get(message.sequence)
        if sequence is None or sequence.phase is not Phase.PREFILLING or message.round != sequence.round:
            return self._drop()
        new = sequence.tell_prompt(message.first, message.likelihoods)
        if new is None:
            return self._drop()
        return [Emit(sequence.id, (), prompt_likelihoods=new)] if new else []

    def _on_prefilled(self, message: Prefilled, now: float) -> list[Command]:
        sequence = self.sequences.get(message.sequence)
        if sequence is None or sequence.phase is not Phase.PREFILLING or message.round != sequence.round:
            return self._drop()
        if message.tokens + message.adopted > sequence.position or sequence.untold:
            return self._drop()
        sequence.prefilled(now)
        self._timeouts.read_on(sequence, now)
        sequence.stats.prefill_seconds += message.seconds
        sequence.stats.add_paced(message.paced)
        sequence.stats.begin_decoding(now)
        return [*self._schedule(now), *self.prefills.prefilled(sequence, message)]

    def _on_verdict(self, verdict: Verdict, now: float) -> Iterable[Command]:
        sequence = self.sequences.get(verdict.sequence)
        if sequence is None or verdict.bonus >= self._workers.vocabulary or not sequence.is_answered_by(verdict):
            return self._drop()
        width = self.scheduler.verdict_arrived(sequence.id, now)
        if verdict.root_alone:
            sequence.verified_root_alone()
        chosen = sequence.chosen(verdict)
        settled = sequence.stats.rounds >= _SETTLING
        if width is not None and settled and not verdict.root_alone and not self.drafts.disturbs(sequence):
            sequence.estimates.target.observe(width, verdict.seconds)
        if len(self.sequences) == 1:
            # Rounds of several requests overlap, so their times do not show the overhead of one.
            sequence.observe_round(verdict, now, undisturbed=not self.drafts.comparing)
        tokens, reason = sequence.truncated(chosen)
        if reason is None:
            return self._commit(sequence, verdict, tokens, now)
        sequence.end(verdict, chosen, tokens, now)
        emit = Emit(sequence.id, tuple(tokens), likelihoods=verdict.likelihoods[: len(tokens)])
        return [emit, *self._finish(sequence, reason, now), *self._schedule(now)]

    def _commit(self, sequence: Sequence, verdict: Verdict, tokens: list[int], now: float) -> Iterator[Command]:
        """Commit `tokens` and go on: the target first, then the drafts, then the client."""
        # Other requests could use the time that this one waits, and a draft on trial would be compared unfairly.
        refreshes = self.strategy.refreshes and len(self.sequences) == 1 and not self.drafts.comparing
        round = sequence.commit(verdict, tokens, now, refreshes)
        self.drafts.follow_length(sequence)
        successor = self.scheduler.preempt(sequence.id, len(tokens))
        if successor is not None:
            sequence.preempt()
            yield from self._stop(sequence, now)
            yield from self._admit(successor, now)
        elif self.drafts.in_turns:
            # The target lets a draft that begins read the prompt alone.
            yield from self.drafts.begin(sequence, now)
        yield from self._schedule(now)
        round.settle()
        if sequence.phase is not Phase.WAITING:
            yield from self.drafts.follow(sequence, round, now)
        yield from self._place()
        told = round.hit if self.strategy.caches and sequence.level != "plain" else None
        yield Emit(sequence.id, tuple(tokens), told, verdict.likelihoods)
        yield from self._start_suspect(now)

    def _on_fault(self, role: Role, incarnation: int, fault: Fault, now: float) -> list[Command]:
        sequence = None if fault.sequence is None else self.sequences.get(fault.sequence)
        if sequence is None:
            return self._drop()
        if role == "prefill":
            return self.prefills.worker_refused(sequence.id, now)
        if role == "draft":
            return [*self.drafts.on_fault(incarnation, fault, sequence, now), *self._schedule(now)]
        stale = bool(fault.nodes) and not sequence.verifying_tree
        if stale or sequence.phase not in AWAITING_TARGET:
            # A tree that was sent twice may be refused twice; the second refusal has no tree any more.
            return self._drop()
        self.scheduler.expect_no_verdict(sequence.id)
        if fault.kind == "refused" and fault.nodes:
            # The target accepted the prompt, so it refuses the tree: the draft grows invalid nodes.
            commands = self.drafts.tree_refused(sequence, now) if sequence.refuse_tree(now) else []
            return [*commands, *self._schedule(now)]
        if fault.kind == "refused":
            return [*self._reject(sequence, fault.text, now), *self._schedule(now)]
        sequence.lose_round(now)
        return self._schedule(now)

    def _place(self) -> list[Command]:
        """Let the workers' places follow the active draft's mode."""
        before, self._shared = self._shared, self.drafts.in_turns
        if self._shared is None or before is None:
            self._shared = self._shared if before is None else before
            return []
        return [] if self._shared == before else [Place(self._shared)]

    def _drop(self) -> list[Command]:
        self.stale += 1
        return []

    # Time and rounds --------------------------------------------------------------------------

    def _on_tick(self, now: float) -> list[Command]:
        again, lost, replace = self._timeouts.overdue(now)
        if replace is not None:
            # What it sends until it has ended is of no use.
            gone = WorkerDown("target", replace.incarnation)
            return [*self._on_worker_down(gone, now, known=bool(lost)), *self.prefills.tick(now), replace]
        commands = [self.prefills.resend(sequence) for sequence in again]
        for sequence in lost:
            self.scheduler.expect_no_verdict(sequence.id)
            commands += self._start(sequence, now)
        return [*commands, *self.prefills.tick(now), *self._schedule(now), *self._features.tap()]

    def _running(self) -> list[Sequence]:
        """Sequences that have a place."""
        return [sequence for sequence in self.sequences.values() if sequence.phase is not Phase.WAITING]

    def _schedule(self, now: float) -> list[Command]:
        """Begin the target's next round, or ask resting drafts for growth that it waits for."""
        if self._workers.target is None:
            return []
        trees, awaited = self.scheduler.schedule(self.sequences, now)
        if awaited:
            return [command for id, steps in awaited for command in self.drafts.extend(self.sequences[id], steps, now)]
        for tree in trees:
            self.drafts.round_sent(self.sequences[tree.sequence])
        if len(trees) < 2:
            return [SendMessage("target", tree) for tree in trees]
        return [SendMessage("target", Forest(tuple(trees)))]
