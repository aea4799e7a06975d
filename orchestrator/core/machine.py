"""All events of one pipeline: those of `round.py`, and what happens beside rounds. Pure."""

from orchestrator.core.commands import Command, Dismiss, Emit, Ready, TellReading
from orchestrator.core.events import Arrived, Tick, WorkerDown, WorkerUp
from orchestrator.core.phases import AWAITING_TARGET, Phase
from orchestrator.core.request import Request
from orchestrator.core.round import Rounds
from protocol.messages.features import Features
from protocol.messages.kv import KvOffer
from protocol.messages.worker import Fault, Hello, Lowered, Prefilled, Prefilling, PromptLogprobs


class Machine(Rounds):
    """The state machine that the runtime, the simulator and tests drive."""

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
        return self.prefills.warnings

    def _on_tick(self, event: Tick, now: float) -> Ready:
        again, lost, replace = self._timeouts.overdue(now)
        if replace is not None:
            # What it sends until it has ended is of no use.
            self._workers.remove(WorkerDown("target", replace.incarnation))
            return Ready([*self._lose_target(now, known=bool(lost)), *self.prefills.tick(now), replace])
        commands = [self.prefills.resend(request) for request in again]
        for request in lost:
            self.scheduler.expect_no_verdict(request.id)
            commands += self._start(request, now)
        return Ready([*commands, *self.prefills.tick(now), *self._schedule(now), *self._features.tap()])

    # Workers

    def _on_worker_up(self, event: WorkerUp, now: float) -> Ready:
        role = event.hello.role
        reason = self._workers.objection(event, self.drafts.election.full)
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
                self.drafts.histories.without_draft.expect_target(event.hello)
                # Before the Starts, so that the prompts are recorded.
                self._features.target_changed()
                commands = [*dismissals, *self._features.tap()]
                for request in self._running():
                    if request.phase is Phase.ADMITTED:
                        commands += self._start(request, now)
                return Ready([*commands, *self.drafts.follow_target(now)])

    def _dismiss_unfit(self, target: Hello, now: float) -> list[Command]:
        """End the drafts that can't work with a new target."""
        commands: list[Command] = []
        for draft, reason in self._workers.target_mismatches(target).items():
            commands.append(Dismiss("draft", draft, reason))
            commands += self._on_worker_down(WorkerDown("draft", draft), now).first
        return commands

    # What workers say beside rounds

    def _on_prefilling(self, message: Prefilling, by: Arrived, now: float) -> Ready:
        request = self._reading(message)
        if request is None or not request.read < message.tokens <= request.position:
            return self._stale()
        request.read = message.tokens
        self._timeouts.read_on(request, now)
        told = TellReading(request.id, message.tokens, request.position)
        return Ready([told] if request.reading_is_due(now) else [])

    def _on_prompt_logprobs(self, message: PromptLogprobs, by: Arrived, now: float) -> Ready:
        request = self._reading(message)
        new = None if request is None else request.tell_prompt(message.first, message.token_logprobs)
        if request is None or new is None:
            return self._stale()
        return Ready([Emit(request.id, (), prompt_token_logprobs=new)] if new else [])

    def _on_kv_offer(self, offer: KvOffer, by: Arrived, now: float) -> Ready:
        request = self.requests.get(offer.request)
        return Ready(self.prefills.add_arena(by.role, request, offer, now))

    def _on_target_fault(self, fault: Fault, by: Arrived, now: float) -> Ready:
        request = self._faulty(fault)
        # A tree that was sent twice may be refused twice; the second refusal has no tree any more.
        stale = request is None or (bool(fault.nodes) and not request.verifying_tree)
        if request is None or stale or request.phase not in AWAITING_TARGET:
            return self._stale()
        self.scheduler.expect_no_verdict(request.id)
        commands: list[Command] = []
        if fault.kind != "refused":
            request.lose_round(now)
        elif not fault.nodes:
            commands = self._reject(request, fault.text, now)
        elif request.refuse_tree(now):
            # The target accepted the prompt, so it refuses the tree: the draft grows invalid nodes.
            commands = self.drafts.tree_refused(request, now)
        return Ready([*commands, *self._schedule(now)])

    def _on_prefill_fault(self, fault: Fault, by: Arrived, now: float) -> Ready:
        request = self._faulty(fault)
        return self._stale() if request is None else Ready(self.prefills.worker_refused(request.id, now))

    def _on_draft_fault(self, fault: Fault, by: Arrived, now: float) -> Ready:
        request = self._faulty(fault)
        if request is None:
            return self._stale()
        return Ready([*self.drafts.on_fault(by.incarnation, fault, request, now), *self._schedule(now)])

    def _faulty(self, fault: Fault) -> Request | None:
        return None if fault.request is None else self.requests.get(fault.request)

    def _on_lowered(self, lowered: Lowered, by: Arrived, now: float) -> Ready:
        lower = self._workers.lower(by.incarnation, lowered.level)
        return Ready(self.drafts.follow_target(now)) if lower else self._stale()

    def _on_features(self, features: Features, by: Arrived, now: float) -> Ready:
        relayed = self._features.relay(features, self.drafts.feature_readers(features.request))
        return self._stale() if relayed is None else Ready(relayed)

    def _on_reused(self, reused: Prefilled, by: Arrived, now: float) -> Ready:
        self.drafts.reused(by.incarnation, reused)
        return Ready([])

    _handlers = Rounds._handlers | {WorkerUp: _on_worker_up, Tick: _on_tick}
    _message_handlers = Rounds._message_handlers | {
        ("target", Prefilling): _on_prefilling,
        ("target", PromptLogprobs): _on_prompt_logprobs,
        ("target", Features): _on_features,
        ("target", Lowered): _on_lowered,
        ("target", KvOffer): _on_kv_offer,
        ("target", Fault): _on_target_fault,
        ("prefill", KvOffer): _on_kv_offer,
        ("prefill", Fault): _on_prefill_fault,
        ("draft", Prefilled): _on_reused,
        ("draft", Fault): _on_draft_fault,
    }
