"""The orchestrator's state machine: one event and the time in, commands out.

Knows no sockets, clocks, processes or randomness; the same events at the same times give the same
commands. It owns the promise that a request's tokens are the target's own, whatever workers do.
"""

from collections import deque
from dataclasses import dataclass
from typing import Literal, assert_never

from orchestrator.core.admission import disagreement, refusal
from orchestrator.core.commands import Command, Dismiss, Emit, Finish, Reject, Replace, Tell
from orchestrator.core.estimates import Estimates
from orchestrator.core.events import Arrived, Ended, Event, Submitted, Tick, WorkerDown, WorkerUp
from orchestrator.core.options import Options
from orchestrator.core.sequence import Phase, Sequence, cut
from orchestrator.core.strategies import STRATEGIES, Send, Wait
from protocol.messages import Fault, FromWorker, Grow, Hello, Prefilled, Role, SequenceId, Stop, Verdict

_ANSWER_SECONDS = 5.0
"""After this long without an answer the target is asked again; its answers are idempotent."""
_SILENCE_SECONDS = 60.0
"""After this long without any sign of a target that owes an answer, it is replaced."""


@dataclass(slots=True)
class Present:
    """A worker that is up."""

    incarnation: int
    hello: Hello
    heard_at: float


class Machine:
    """All requests of one pipeline. Rounds of several requests interleave, one verification at a time."""

    def __init__(self, options: Options) -> None:
        self.strategy = STRATEGIES[options.strategy](options)
        self.sequences: dict[SequenceId, Sequence] = {}
        self.stale = 0
        """Messages that were not acted on: another life, an old round, an unknown sequence."""
        self._workers: dict[Role, Present] = {}
        self._waiting: deque[SequenceId] = deque()
        """Sequences in the order in which the target serves them."""
        self._under_verification: SequenceId | None = None
        self._wake_at: float | None = None
        self._estimates = {"greedy": Estimates(), "sampled": Estimates()}

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

    def deadline(self) -> float | None:
        """When the next Tick is due at the latest; None if nothing is waited for."""
        owed = [sequence.asked_at + _ANSWER_SECONDS for sequence in self._owed()]
        if self._wake_at is not None:
            owed.append(self._wake_at)
        return min(owed, default=None)

    # Requests ---------------------------------------------------------------------------------

    def _on_submitted(self, event: Submitted, now: float) -> list[Command]:
        kind = "greedy" if event.request.sampling.temperature == 0 else "sampled"
        sequence = Sequence(event.sequence, event.request, self._estimates[kind], self.strategy.drafts, now)
        self.sequences[sequence.id] = sequence
        self._waiting.append(sequence.id)
        return [*self._start("target", sequence, now), *self._start("draft", sequence, now)]

    def _on_ended(self, event: Ended, now: float) -> list[Command]:
        sequence = self.sequences.get(event.sequence)
        if sequence is None:
            return []
        sequence.tally.generated -= event.surplus
        return [*self._finish(sequence, event.reason, now), *self._schedule(now)]

    def _finish(self, sequence: Sequence, reason: Literal["stop", "length", "cancelled"], now: float) -> list[Command]:
        statistics = sequence.tally.statistics(now, self.strategy.drafts, self.strategy.caches)
        return [*self._forget(sequence), Finish(sequence.id, reason, statistics)]

    def _forget(self, sequence: Sequence) -> list[Command]:
        del self.sequences[sequence.id]
        self._waiting.remove(sequence.id)
        if self._under_verification == sequence.id:
            self._under_verification = None
        return [Tell(role, Stop(sequence.id)) for role in self._workers]

    # Workers ----------------------------------------------------------------------------------

    def _on_worker_up(self, event: WorkerUp, now: float) -> list[Command]:
        role = event.hello.role
        other = self._workers.get("target" if role == "draft" else "draft")
        mismatch = None if other is None else disagreement(event.hello, other.hello)
        if mismatch is not None:
            return [Dismiss(role, event.incarnation, mismatch)]
        self._workers[role] = Present(event.incarnation, event.hello, now)
        commands: list[Command] = []
        for sequence in list(self.sequences.values()):
            commands += self._start(role, sequence, now)
            if role == "target" and not sequence.drafting:
                # A draft is told of a sequence only when the target's vocabulary is known.
                commands += self._start("draft", sequence, now)
        return commands

    def _on_worker_down(self, event: WorkerDown, now: float) -> list[Command]:
        present = self._workers.get(event.role)
        if present is None or present.incarnation != event.incarnation:
            return []
        del self._workers[event.role]
        for sequence in self.sequences.values():
            if event.role == "draft":
                sequence.drafting = False
            else:
                sequence.phase = Phase.PREFILLING
                sequence.outstanding = None
        if event.role == "target":
            self._under_verification = None
        return self._schedule(now)

    def _start(self, role: Role, sequence: Sequence, now: float) -> list[Command]:
        """Tell a worker of a sequence, if the worker is there and can be of use."""
        target = self._workers.get("target")
        if target is None or sequence.id not in self.sequences:
            return []
        if role == "target":
            return self._start_target(target.hello, sequence, now)
        if "draft" not in self._workers or not sequence.draftable:
            return []
        sequence.drafting = True
        sequence.grown_at = now
        plan = self.strategy.plan(sequence.estimates)
        return [Tell("draft", sequence.start(plan, target.hello.vocabulary))]

    def _start_target(self, target: Hello, sequence: Sequence, now: float) -> list[Command]:
        reason = refusal(sequence.request, target)
        if reason is not None:
            return [*self._forget(sequence), Reject(sequence.id, reason)]
        sequence.fit(target.context)
        sequence.phase = Phase.PREFILLING
        sequence.outstanding = None
        sequence.asked_at = now
        return [Tell("target", sequence.start())]

    # Messages ---------------------------------------------------------------------------------

    def _on_arrived(self, event: Arrived, now: float) -> list[Command]:
        present = self._workers.get(event.role)
        if present is None or present.incarnation != event.incarnation:
            return self._drop()
        present.heard_at = now
        return self._on_message(event.role, event.message, now)

    def _on_message(self, role: Role, message: FromWorker, now: float) -> list[Command]:
        match role, message:
            case "target", Verdict():
                return self._on_verdict(message, now)
            case "target", Prefilled():
                return self._on_prefilled(message, now)
            case "draft", Grow():
                return self._on_growth(message, now)
            case _, Fault():
                return self._on_fault(role, message, now)
            case _:
                return []

    def _on_prefilled(self, message: Prefilled, now: float) -> list[Command]:
        sequence = self.sequences.get(message.sequence)
        if sequence is None or sequence.phase is not Phase.PREFILLING or message.round != sequence.round:
            return self._drop()
        sequence.phase = Phase.FREE
        sequence.free_since = now
        sequence.tally.decoding(now)
        return self._schedule(now)

    def _on_growth(self, message: Grow, now: float) -> list[Command]:
        sequence = self.sequences.get(message.sequence)
        if sequence is None or not sequence.draftable:
            return self._drop()
        sequence.cache.merge(message, sequence.estimates.calibration, self._vocabulary)
        sequence.tally.growth(message.evaluated, message.seconds)
        if message.evaluated:
            sequence.estimates.step.observe(message.seconds)
        sequence.grown_at = now
        sequence.drafting = True
        return self._schedule(now)

    def _on_verdict(self, verdict: Verdict, now: float) -> list[Command]:
        sequence = self.sequences.get(verdict.sequence)
        if sequence is None or not sequence.accepts(verdict):
            return self._drop()
        asked = sequence.outstanding
        assert asked is not None
        self._under_verification = None
        sequence.learn(verdict)
        sequence.estimates.target.observe(len(asked.tokens), verdict.seconds)
        self._note_overhead(sequence, verdict, now)
        last = cut(sequence.request, sequence.tokens_of(verdict), sequence.remaining)
        sequence.tally.tokens(len(last.tokens), now)
        if last.reason is not None:
            sequence.tokens += last.tokens
            emit = Emit(sequence.id, tuple(last.tokens))
            return [emit, *self._finish(sequence, last.reason, now), *self._schedule(now)]
        return self._commit(sequence, last.tokens, now)

    def _commit(self, sequence: Sequence, tokens: list[int], now: float) -> list[Command]:
        """Go on: the target first, then the draft, then the client."""
        outcome = sequence.commit(tokens, now)
        sequence.tally.outcome(outcome.hit)
        sequence.estimates.hits.observe(outcome.fan, outcome.guessed)
        self._waiting.remove(sequence.id)
        self._waiting.append(sequence.id)
        commands = self._schedule(now)
        if sequence.draftable and "draft" in self._workers:
            plan = self.strategy.plan(sequence.estimates)
            commands.append(Tell("draft", sequence.reroot(tokens, not outcome.hit, plan)))
        commands.append(Emit(sequence.id, tuple(tokens)))
        return commands

    def _on_fault(self, role: Role, fault: Fault, now: float) -> list[Command]:
        sequence = None if fault.sequence is None else self.sequences.get(fault.sequence)
        if sequence is None:
            return self._drop()
        if role == "draft":
            sequence.drafting = False
            sequence.draftable = fault.kind == "lost"
            return [*self._start("draft", sequence, now), *self._schedule(now)]
        if self._under_verification == sequence.id:
            self._under_verification = None
        if fault.kind == "refused" and sequence.speculating:
            # The prompt was fine, so the tree is what the target can't take: this draft grows nonsense.
            sequence.distrust(now)
            return [*self._stop_draft(sequence), *self._schedule(now)]
        if fault.kind == "refused":
            return [*self._forget(sequence), Reject(sequence.id, fault.text), *self._schedule(now)]
        return [*self._start("target", sequence, now), *self._schedule(now)]

    def _stop_draft(self, sequence: Sequence) -> list[Command]:
        return [Tell("draft", Stop(sequence.id))] if "draft" in self._workers else []

    def _note_overhead(self, sequence: Sequence, verdict: Verdict, now: float) -> None:
        """What this round took beyond the forward; rounds of several requests overlap and tell nothing."""
        if len(self.sequences) == 1:
            seconds = max(0.0, now - sequence.free_since - sequence.waited - verdict.seconds)
            sequence.tally.overhead(seconds)
            sequence.estimates.hop.observe(seconds)

    @property
    def _vocabulary(self) -> int:
        target = self._workers.get("target")
        return 0 if target is None else target.hello.vocabulary

    def _drop(self) -> list[Command]:
        self.stale += 1
        return []

    # Time and turns ---------------------------------------------------------------------------

    def _on_tick(self, now: float) -> list[Command]:
        commands: list[Command] = []
        for sequence in self._owed():
            if now >= sequence.asked_at + _ANSWER_SECONDS:
                commands += self._ask_again(sequence, now)
        return [*commands, *self._schedule(now)]

    def _owed(self) -> list[Sequence]:
        """Sequences that the present target owes an answer."""
        if "target" not in self._workers:
            return []
        return [sequence for sequence in self.sequences.values() if sequence.phase is not Phase.FREE]

    def _ask_again(self, sequence: Sequence, now: float) -> list[Command]:
        target = self._workers["target"]
        sequence.asked_at = now
        if now - target.heard_at > _SILENCE_SECONDS:
            reason = f"The target has been silent for {now - target.heard_at:.0f} s."
            return [Replace("target", target.incarnation, reason)]
        return [Tell("target", sequence.outstanding or sequence.start())]

    def _schedule(self, now: float) -> list[Command]:
        """Give the free target its next verification: the sequences take turns."""
        self._wake_at = None
        if self._under_verification is not None or "target" not in self._workers:
            return []
        for id in self._waiting:
            sequence = self.sequences[id]
            if sequence.phase is not Phase.FREE:
                continue
            match self.strategy.decide(sequence.view(now)):
                case Send(nodes, gave_up):
                    self._under_verification = id
                    sequence.drafting = sequence.drafting and not gave_up
                    self._wake_at = None
                    return [Tell("target", sequence.verify(nodes, now))]
                case Wait(until):
                    self._wake_at = until if self._wake_at is None else min(until, self._wake_at)
        return []
