"""What happens at each event, top to bottom: a request, its rounds, a draft's growth, a worker's coming and end. Pure.

It knows no sockets, clocks, processes or randomness; the same events at the same times give the same commands. It
guarantees that a request's tokens are the target's own, whatever workers do.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from orchestrator.core.commands import Command, Dismiss, Emit, Finish, Pardon, Ready, Reject, SendMessage, TellReading
from orchestrator.core.drafts.pool import DraftPool
from orchestrator.core.events import Arrived, Ended, Event, Submitted, Tick, WorkerDown, WorkerUp
from orchestrator.core.meter import Answer, Meter
from orchestrator.core.options import Options
from orchestrator.core.phases import AWAITING_TARGET, Phase, Trigger
from orchestrator.core.policy.strategies import STRATEGIES
from orchestrator.core.prefills import PrefillRouter
from orchestrator.core.scheduler import ResponseTimeouts, Scheduler
from orchestrator.core.sequence import Sequence
from orchestrator.core.workers import FeatureRelay, WorkerRegistry, refusal
from protocol.messages.base import SequenceId
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


class Machine:
    """All requests of one pipeline. One forward of the target serves all of them that are ready."""

    def __init__(self, options: Options, profile: str = "") -> None:
        """`profile`: name of the device profile that paces the workers, if there is one."""
        self.strategy = STRATEGIES[options.strategy](options)
        self.sequences: dict[SequenceId, Sequence] = {}
        self.stale = 0
        """Messages that were ignored: of an incarnation that is gone, of an old round, of an unknown sequence."""
        self.meter = Meter(self.sequences)
        self.scheduler = Scheduler(self.strategy, options.concurrent, options.turn)
        self.prefills = PrefillRouter(options)
        self._workers = WorkerRegistry(options.context_limit)
        self._timeouts = ResponseTimeouts(self.sequences, self._workers)
        self._features = FeatureRelay(self.sequences, self._workers)
        self.drafts = DraftPool(
            self.strategy, self.sequences, self._workers, self.meter, self.prefills.written, options.placement
        )
        self._profile = profile
        self._on_event: dict[type[Any], Callable[[Any, float], Ready]] = {
            Submitted: self._on_submitted,
            Ended: self._on_ended,
            WorkerUp: self._on_worker_up,
            WorkerDown: self._on_worker_down,
            Arrived: self._on_arrived,
            Tick: self._on_tick,
        }
        self._on_message: dict[tuple[str, type[Any]], Callable[[Any, Arrived, float], Ready]] = {
            ("target", Verdict): self._on_verdict,
            ("target", Prefilling): self._on_prefilling,
            ("target", PromptLikelihoods): self._on_prompt_likelihoods,
            ("target", Prefilled): self._on_prefilled,
            ("target", Features): self._on_features,
            ("target", Lowered): self._on_lowered,
            ("target", KvOffer): self._on_kv_offer,
            ("target", Fault): self._on_target_fault,
            ("prefill", KvOffer): self._on_kv_offer,
            ("prefill", Fault): self._on_prefill_fault,
            ("draft", Grow): self._on_grow,
            ("draft", KvOffer): self._on_draft_arena,
            ("draft", Prefilled): self._on_adopted,
            ("draft", Fault): self._on_draft_fault,
        }

    def step(self, event: Event, now: float) -> Ready:
        """Fold one event into the state; return what the runtime must now do."""
        return self._on_event[type(event)](event, now)

    def deadline(self) -> float | None:
        """When the next Tick is due at the latest; None if no Tick is needed."""
        times = (self._timeouts.deadline(), self.scheduler.wake_at, self.prefills.deadline())
        return min((time for time in times if time is not None), default=None)

    def workers(self) -> list[tuple[int, Hello, bool]]:
        """Each worker that is up: its incarnation, its Hello, and whether it runs on another machine."""
        return self._workers.workers()

    @property
    def kv_warnings(self) -> int:
        """How often KV of other requests was offered and could not be used."""
        return self.prefills.warnings + self.drafts.warnings

    # A round ----------------------------------------------------------------------------------

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

    def _on_verdict(self, verdict: Verdict, by: Arrived, now: float) -> Ready:
        sequence = self.sequences.get(verdict.sequence)
        if sequence is None or verdict.bonus >= self._workers.vocabulary or not sequence.is_answered_by(verdict):
            return self._stale()
        width = self.scheduler.verdict_arrived(sequence.id, now)
        chosen = sequence.chosen(verdict)
        tokens, reason = sequence.truncated(chosen)
        answer = self.meter.answered(sequence, verdict, chosen, reason is not None, width, self.drafts.mode, now)
        if reason is not None:
            self.meter.counted(sequence, answer, len(tokens), hit=None)
            emit = Emit(sequence.id, tuple(tokens), likelihoods=verdict.likelihoods[: len(tokens)])
            return Ready([emit, *self._finish(sequence, reason, now), *self._schedule(now)])
        # Other requests could use the time that this one waits, and a draft on trial would be compared unfairly.
        refreshes = self.strategy.refreshes and len(self.sequences) == 1 and not self.drafts.mode.comparing
        hit = sequence.commit(tokens, refreshes, now)
        self.drafts.follow_length(sequence)
        first = [*self._take_turns(sequence, len(tokens), now), *self._schedule(now)]
        return Ready(first, partial(self._follow, sequence, answer, hit, now))

    def _follow(self, sequence: Sequence, answer: Answer, hit: bool, now: float) -> list[Command]:
        """After a commit, once the target's next round is on its way: the drafts, then the client."""
        tokens, speculation = answer.chosen, sequence.speculation
        self.meter.counted(sequence, answer, len(tokens), hit)
        speculation.prune()
        follows = self.drafts.follow(sequence, tokens, hit, now) if sequence.phase is not Phase.WAITING else []
        told = hit if self.strategy.caches and sequence.level != "plain" else None
        emit = Emit(sequence.id, tuple(tokens), told, answer.verdict.likelihoods)
        return [*follows, *self.drafts.place(), emit, *self._start_suspect(now)]

    def _take_turns(self, sequence: Sequence, tokens: int, now: float) -> list[Command]:
        """The sequence got so many tokens: it may have to make room, or a draft that drafts in turns may begin it."""
        successor = self.scheduler.preempt(sequence.id, tokens)
        if successor is not None:
            sequence.preempt()
            return [*self._stop(sequence, now), *self._admit(successor, now)]
        # The target lets a draft that begins read the prompt alone.
        return self.drafts.begin(sequence, now) if self.drafts.mode.in_turns else []

    def _on_grow(self, growth: Grow, by: Arrived, now: float) -> Ready:
        if self.drafts.merge_growth(by.incarnation, growth, now):
            return Ready(self._schedule(now))
        caught_up = self.drafts.caught_up(by.incarnation, growth, now)
        return Ready(caught_up) if caught_up else self._stale()

    def _on_tick(self, event: Tick, now: float) -> Ready:
        again, lost, replace = self._timeouts.overdue(now)
        if replace is not None:
            # What it sends until it has ended is of no use.
            self._workers.remove(WorkerDown("target", replace.incarnation))
            return Ready([*self._lose_target(now, known=bool(lost)), *self.prefills.tick(now), replace])
        commands = [self.prefills.resend(sequence) for sequence in again]
        for sequence in lost:
            self.scheduler.expect_no_verdict(sequence.id)
            commands += self._start(sequence, now)
        return Ready([*commands, *self.prefills.tick(now), *self._schedule(now), *self._features.tap()])

    # A request --------------------------------------------------------------------------------

    def _on_submitted(self, event: Submitted, now: float) -> Ready:
        estimates = self.drafts.estimates(event.request, len(event.request.tokens))
        sequence = Sequence(event.sequence, event.request, estimates, self.strategy.drafts, now)
        self.sequences[sequence.id] = sequence
        return Ready(self._admit(sequence.id, now) if self.scheduler.add(sequence.id) else [])

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

    def _on_prefilling(self, message: Prefilling, by: Arrived, now: float) -> Ready:
        sequence = self._reading(message)
        if sequence is None or not sequence.read < message.tokens <= sequence.position:
            return self._stale()
        sequence.read = message.tokens
        self._timeouts.read_on(sequence, now)
        told = TellReading(sequence.id, message.tokens, sequence.position)
        return Ready([told] if sequence.reading_is_due(now) else [])

    def _on_prompt_likelihoods(self, message: PromptLikelihoods, by: Arrived, now: float) -> Ready:
        sequence = self._reading(message)
        new = None if sequence is None else sequence.tell_prompt(message.first, message.likelihoods)
        if sequence is None or new is None:
            return self._stale()
        return Ready([Emit(sequence.id, (), prompt_likelihoods=new)] if new else [])

    def _on_prefilled(self, message: Prefilled, by: Arrived, now: float) -> Ready:
        sequence = self._reading(message)
        if sequence is None or message.tokens + message.adopted > sequence.position or sequence.untold:
            return self._stale()
        sequence.prefilled(now)
        self._timeouts.read_on(sequence, now)
        self.meter.prefilled(sequence, message, now)
        return Ready([*self._schedule(now), *self.prefills.prefilled(sequence, message)])

    def _on_kv_offer(self, offer: KvOffer, by: Arrived, now: float) -> Ready:
        sequence = self.sequences.get(offer.sequence)
        commands = self.prefills.add_arena(by.role, sequence, offer, now)
        # A draft that shares the target's KV may have waited for it.
        return Ready(commands if sequence is None else [*commands, *self.drafts.begin(sequence, now)])

    def _on_ended(self, event: Ended, now: float) -> Ready:
        sequence = self.sequences.get(event.sequence)
        if sequence is None:
            return Ready([])
        sequence.stats.generated -= event.surplus
        return Ready([*self._finish(sequence, event.reason, now), *self._schedule(now)])

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

    def _stop(self, sequence: Sequence, now: float) -> list[Command]:
        """End a sequence on all workers."""
        releases = self.prefills.sequence_ended(sequence)
        stops: list[Command] = [
            SendMessage(role, Stop(sequence.id)) for role in ("target", "prefill") if role in self._workers
        ]
        return [*stops, *releases, *self.drafts.sequence_ended(sequence, now)]

    def _reading(self, message: Prefilling | PromptLikelihoods | Prefilled) -> Sequence | None:
        """The sequence whose prompt the target reads, if the message is about it."""
        sequence = self.sequences.get(message.sequence)
        reads = sequence is not None and sequence.phase is Phase.PREFILLING and message.round == sequence.round
        return sequence if reads else None

    # A worker ---------------------------------------------------------------------------------

    def _on_arrived(self, event: Arrived, now: float) -> Ready:
        if not self._workers.note_message(event, now):
            return self._stale()
        handle = self._on_message.get((event.role, type(event.message)))
        return Ready([]) if handle is None else handle(event.message, event, now)

    def _on_worker_up(self, event: WorkerUp, now: float) -> Ready:
        role = event.hello.role
        reason = self._workers.objection(event, self.drafts.full)
        if reason is not None:
            return Ready([Dismiss(role, event.incarnation, reason)])
        dismissals = self._dismiss_unfit(event.hello, now) if role == "target" else []
        self._workers.add(event, now)
        match role:
            case "prefill":
                self.prefills.worker_up()
                return Ready([])
            case "draft":
                return Ready([*self._features.tap(), *self.drafts.draft_up(event, now), *self.drafts.place()])
            case "target":
                self.drafts.expect_target(event.hello)
                # Before the Starts, so that the prompts are recorded.
                self._features.target_changed()
                commands = [*dismissals, *self._features.tap()]
                for sequence in self._running():
                    if sequence.phase is Phase.ADMITTED:
                        commands += self._start(sequence, now)
                return Ready([*commands, *self.drafts.follow_target(now)])

    def _dismiss_unfit(self, target: Hello, now: float) -> list[Command]:
        """End the drafts that can't work with a new target."""
        commands: list[Command] = []
        for draft, reason in self._workers.target_mismatches(target).items():
            commands.append(Dismiss("draft", draft, reason))
            commands += self._on_worker_down(WorkerDown("draft", draft), now).first
        return commands

    def _on_worker_down(self, event: WorkerDown, now: float) -> Ready:
        if not self._workers.remove(event):
            return Ready([])
        match event.role:
            case "prefill":
                return Ready(self.prefills.worker_down(now))
            case "draft":
                commands = [*self.drafts.draft_down(event.incarnation, now), *self._schedule(now)]
                return Ready([*commands, *self._features.tap()])
            case "target":
                return Ready(self._lose_target(now))

    def _lose_target(self, now: float, known: bool = False) -> list[Command]:
        """The target is gone. `known`: for what it did to some requests, and not for one that was at work."""
        # All of them first: the successor of one that is rejected has no target either.
        running = self._running()
        fatal = [one for one in running if one.lose_target(not known and not self.prefills.adopting(one.id))]
        self.scheduler.lose_target()
        commands = self.prefills.target_down()
        culprits = bool(commands or fatal)
        for sequence in fatal:
            commands += self._reject(sequence, _FATAL, now)
        return [*commands, Pardon()] if culprits else commands

    def _suspect_at_work(self, besides: Sequence) -> bool:
        """Whether the target serves another request over which one may have ended. They are served one by one, so that
        the next death shows which one it is."""
        idle = (Phase.WAITING, Phase.ADMITTED)
        return any(one.suspect and one is not besides and one.phase not in idle for one in self.sequences.values())

    def _start_suspect(self, now: float) -> list[Command]:
        """Start the next of the suspects that wait for one another."""
        waiting = [one for one in self.sequences.values() if one.suspect and one.phase is Phase.ADMITTED]
        return self._start(waiting[0], now) if waiting else []

    def _on_target_fault(self, fault: Fault, by: Arrived, now: float) -> Ready:
        sequence = self._faulty(fault)
        # A tree that was sent twice may be refused twice; the second refusal has no tree any more.
        stale = sequence is None or (bool(fault.nodes) and not sequence.verifying_tree)
        if sequence is None or stale or sequence.phase not in AWAITING_TARGET:
            return self._stale()
        self.scheduler.expect_no_verdict(sequence.id)
        commands: list[Command] = []
        if fault.kind != "refused":
            sequence.lose_round(now)
        elif not fault.nodes:
            commands = self._reject(sequence, fault.text, now)
        elif sequence.refuse_tree(now):
            # The target accepted the prompt, so it refuses the tree: the draft grows invalid nodes.
            commands = self.drafts.tree_refused(sequence, now)
        return Ready([*commands, *self._schedule(now)])

    def _on_prefill_fault(self, fault: Fault, by: Arrived, now: float) -> Ready:
        sequence = self._faulty(fault)
        return self._stale() if sequence is None else Ready(self.prefills.worker_refused(sequence.id, now))

    def _on_draft_fault(self, fault: Fault, by: Arrived, now: float) -> Ready:
        sequence = self._faulty(fault)
        if sequence is None:
            return self._stale()
        return Ready([*self.drafts.on_fault(by.incarnation, fault, sequence, now), *self._schedule(now)])

    def _faulty(self, fault: Fault) -> Sequence | None:
        return None if fault.sequence is None else self.sequences.get(fault.sequence)

    def _on_lowered(self, lowered: Lowered, by: Arrived, now: float) -> Ready:
        lower = self._workers.lower(by.incarnation, lowered.level)
        return Ready(self.drafts.follow_target(now)) if lower else self._stale()

    def _on_features(self, features: Features, by: Arrived, now: float) -> Ready:
        relayed = self._features.relay(features, self.drafts.feature_readers(features.sequence))
        return self._stale() if relayed is None else Ready(relayed)

    def _on_draft_arena(self, offer: KvOffer, by: Arrived, now: float) -> Ready:
        self.drafts.add_arena(by.incarnation, offer)
        return Ready([])

    def _on_adopted(self, adopted: Prefilled, by: Arrived, now: float) -> Ready:
        self.drafts.note_adoption(by.incarnation, adopted)
        return Ready([])

    def _running(self) -> list[Sequence]:
        """Sequences that have a place."""
        return [sequence for sequence in self.sequences.values() if sequence.phase is not Phase.WAITING]

    def _stale(self) -> Ready:
        self.stale += 1
        return Ready([])
