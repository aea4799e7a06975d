"""All drafts of one pipeline: which requests each one serves, and how the election is carried out. Pure."""

from collections.abc import Mapping

from msgspec import structs

from orchestrator.core.commands import Command, Place, SendMessage
from orchestrator.core.drafts.draft import CatchingUp, Draft, too_short
from orchestrator.core.drafts.election import DraftStatus, Election, Trial, TrialRequest
from orchestrator.core.drafts.history import DraftHistories, DraftHistory
from orchestrator.core.estimates import Estimates, TurnTaking
from orchestrator.core.events import Task, WorkerUp
from orchestrator.core.meter import Meter
from orchestrator.core.options import PlacementChoice
from orchestrator.core.phases import COMPARING, IN_TURNS, DraftTrigger, Mode, Phase
from orchestrator.core.policy.decision import Strategy
from orchestrator.core.request import Request
from orchestrator.core.speculation import Speculation
from orchestrator.core.tuning import TUNING
from orchestrator.core.workers import WorkerRegistry
from protocol.messages.base import RequestId
from protocol.messages.plans import BestFirst, GrowthPlan
from protocol.messages.worker import Extend, Fault, Grow, Prefilled, Reroot, Stop


class DraftPool:
    """One draft is active and at most one is on trial: these are in use, if the target verifies guesses. The others
    serve no request."""

    def __init__(
        self,
        strategy: Strategy,
        requests: Mapping[RequestId, Request],
        workers: WorkerRegistry,
        meter: Meter,
        placement: PlacementChoice = "auto",
    ) -> None:
        self._strategy = strategy
        self._requests = requests
        self._workers = workers
        self._meter = meter
        self.election = Election()
        self.histories = DraftHistories()
        self._placement = placement
        self._drafts: dict[int, Draft] = {}
        self._trial: Trial | None = None
        self._active: int | None = None
        """The draft whose speculations the requests hold."""
        self._idle_since: float | None = None
        """Since when no request is live; None while one is."""
        self._pause = 0.0
        """Seconds without a request before the last one."""
        self._shared_device: bool | None = None
        """The workers share one device; None until a draft is active."""

    @property
    def mode(self) -> Mode:
        """How the drafts in use and the target work together at present."""
        if self._active is None or not self._guessing:
            return Mode.PLAIN
        in_turns = self._history(self._active).turns.in_turns
        if self._trial is None or self.election.alone:
            return Mode.IN_TURNS if in_turns else Mode.BESIDE
        return Mode.COMPARING_IN_TURNS if in_turns else Mode.COMPARING_BESIDE

    def place(self) -> list[Command]:
        """Let the workers' places follow the mode."""
        mode, before = self.mode, self._shared_device
        if mode is Mode.PLAIN:
            return []
        self._shared_device = mode in IN_TURNS
        return [] if before in (None, self._shared_device) else [Place(self._shared_device)]

    def statuses(self) -> dict[int, DraftStatus]:
        return self.election.statuses()

    def estimates(self, task: Task, context: int) -> Estimates:
        """The estimates of a request of so many tokens."""
        return self._history(self._active).estimates(task, context)

    def committed(self, request: Request, now: float) -> list[Command]:
        """The request has grown, and forwards behind longer contexts have estimates of their own. In turns, drafts
        that do not serve it yet may begin: the target lets them read the prompt alone."""
        if self._active is not None and len(request.tokens) >= request.speculation.estimates.longest:
            request.speculation.estimates = self.estimates(request.task, len(request.tokens))
        return self.begin(request, now) if self.mode in IN_TURNS else []

    def follow_target(self, now: float) -> list[Command]:
        """Serve the requests that the target was sent, or stop, if it verifies no guesses."""
        if not self._guessing:
            for request in self._requests.values():
                request.speculation.stop()
        return self._apply_election(now)

    # Drafts -----------------------------------------------------------------------------------

    def draft_up(self, event: WorkerUp, now: float) -> list[Command]:
        commands = self.draft_down(event.incarnation, now)
        auto = self._placement == "auto"
        turns = TurnTaking(event.shared_device if auto else self._placement == "shared", fixed=not auto)
        self._drafts[event.incarnation] = Draft(event.hello, self.histories.take(event.hello, turns))
        self.election.draft_up(event.incarnation)
        return [*commands, *self._apply_election(now)]

    def draft_down(self, incarnation: int, now: float) -> list[Command]:
        """A draft is gone. If it was active, the best of the others becomes active."""
        draft = self._drafts.pop(incarnation, None)
        if draft is None:
            return []
        self.election.draft_down(incarnation)
        self.histories.store(draft.hello, draft.history)
        return self._apply_election(now)

    def tree_refused(self, request: Request, now: float) -> list[Command]:
        """The target refused a tree that the active draft grew."""
        if self._active is None:
            return []
        if self.election.active_failed():
            return self._apply_election(now)
        return self._stop(self._active, request.id)

    # Requests -------------------------------------------------------------------------------

    def begin(self, request: Request, now: float) -> list[Command]:
        """Start a request that has a place on the drafts in use that do not serve it yet.

        On the target's device a draft reads the prompt once the target has read it and given the first token: both at
        once would take longer, and the first token would be late.
        """
        if self._idle_since is not None:
            self._pause, self._idle_since = now - self._idle_since, None
        idle = [command for id in self._drafts for command in self._stop_catching_up(id, now)]
        if request.phase is Phase.WAITING or (self.mode in IN_TURNS and not request.round):
            return idle
        return idle + [
            command
            for id in self._in_use()
            if request.id not in self._drafts[id].started
            for command in self._start(id, request, now)
        ]

    def round_sent(self, request: Request) -> None:
        """The target was sent a tree of this request."""
        if self._trial is not None and self.mode in COMPARING:
            self._trial.round_sent(request)

    def extend(self, request: Request, steps: int, now: float) -> list[Command]:
        """Ask the active draft, which rests, to grow up to `steps` steps below the root."""
        if self._active is None or request.id not in self._drafts[self._active].started:
            return []
        self._drafts[self._active].owes_growth(now)
        request.speculation.ask(steps, now)
        self._meter.asked(request)
        return [SendMessage("draft", Extend(request.id, request.round, steps), self._active)]

    def follow(self, request: Request, tokens: list[int], hit: bool, now: float) -> list[Command]:
        """The drafts follow a round that committed `tokens`. `hit`: the active draft's tree has guesses below them."""
        if self._active is None or not self._guessing:
            return []
        commands = self._reroot(self._active, request, tokens, hit, now)
        if self._trial is not None:
            speculation = self._trial_request(self._trial, request, now).speculation
            # One that begins behind this round is there already.
            if speculation.tree.root.id != request.tree.root.id:
                comparison = self._meter.compare(speculation, tokens)
                trial_hit = self._trial.follow(request, tokens, request.ended_round[1], now)
                comparison.calibrate()
                speculation.prune()
                id = self._trial.incarnation
                commands += self._reroot(id, request, tokens, trial_hit, now)
        return [*commands, *self._reconsider(request, now)]

    def request_ended(self, request: Request, now: float) -> list[Command]:
        self._meter.ended(request)
        if self._trial is not None:
            self._trial.requests.pop(request.id, None)
        idle: list[Command] = []
        if not self._requests:
            self._idle_since = now
            # The next turn of an agent's loop without pauses would wait for the reading.
            if self._active is not None and self._pause > TUNING.turn_pause:
                idle = self._catch_up(self._active, request, now)
        for draft in self._drafts.values():
            draft.remember(request)
        return [*(command for id in self._drafts for command in self._stop(id, request.id)), *idle]

    def feature_readers(self, request: RequestId) -> list[int]:
        """The drafts in use that serve the request and read the target's features."""
        serving = [id for id in self._in_use() if request in self._drafts[id].started]
        return [id for id in serving if self._drafts[id].hello.features is not None]

    # Messages of drafts -----------------------------------------------------------------------

    def caught_up(self, incarnation: int, growth: Grow, now: float) -> list[Command]:
        """Growth of a request that has ended: of one that the draft has read since."""
        read = self._drafts[incarnation].catching_up
        if read is None or read.request != growth.request:
            return []
        return self._stop_catching_up(incarnation, now, done=True)

    def merge_growth(self, incarnation: int, growth: Grow, now: float) -> bool:
        """Merge growth into the draft's speculation. Returns False for growth that was ignored."""
        request = self._requests.get(growth.request)
        if request is None or incarnation not in self._in_use():
            return False
        speculation = self._speculation(incarnation, request, now)
        if not speculation.wanted or growth.request not in self._drafts[incarnation].started:
            return False
        self._drafts[incarnation].has_grown(growth.request)
        step, active = speculation.merge(growth, self._workers.vocabulary, now), incarnation == self._active
        self._meter.grew(request, speculation.estimates, step, growth, active)
        if self._trial is not None and not active:
            self._trial.requests[request.id].compared = True
        return True

    def on_fault(self, incarnation: int, fault: Fault, request: Request, now: float) -> list[Command]:
        """A draft has lost a request, or can't serve it."""
        draft = self._drafts[incarnation]
        if incarnation not in self._in_use() or request.id not in draft.started:
            return []
        started = draft.started.pop(request.id)
        speculation = self._speculation(incarnation, request, now)
        speculation.enter(DraftTrigger.STOP if fault.kind == "lost" else DraftTrigger.DECLINE)
        # At most one Start a round, even if the draft loses the request again and again.
        return self._start(incarnation, request, now) if started < request.round else []

    def reused(self, incarnation: int, message: Prefilled) -> None:
        """A draft goes on with KV that it had read before."""
        self._drafts[incarnation].conversations.held(message.request, message.adopted)
        request = self._requests.get(message.request)
        if request is not None and incarnation == self._active:
            request.speculation.shorten_prefill(message.tokens)

    @property
    def _guessing(self) -> bool:
        """The target that is up, or will be, verifies guesses."""
        target = self._workers.target
        return target is None or target.level != "plain"

    def _in_use(self) -> list[int]:
        """The active draft and the one on trial; none beside a target that verifies no guesses."""
        if not self._guessing:
            return []
        trial = [] if self._trial is None else [self._trial.incarnation]
        return trial if self._active is None else [self._active, *trial]

    def _history(self, incarnation: int | None) -> DraftHistory:
        return self.histories.without_draft if incarnation is None else self._drafts[incarnation].history

    def _speculation(self, incarnation: int, request: Request, now: float) -> Speculation:
        """The speculation of a draft in use for a request."""
        if self._trial is not None and incarnation == self._trial.incarnation:
            return self._trial_request(self._trial, request, now).speculation
        return request.speculation

    def _reads(self, incarnation: int, now: float) -> bool:
        """A draft in use reads the prompt of a request."""
        serves = self._drafts[incarnation].started
        return any(self._speculation(incarnation, self._requests[id], now).reading for id in serves)

    def _trial_request(self, trial: Trial, request: Request, now: float) -> TrialRequest:
        trial_request = trial.requests.get(request.id)
        if trial_request is None:
            speculation = self._new_speculation(trial.incarnation, request, now)
            # Before the first verdict, both drafts begin with the prompt.
            trial_request = TrialRequest(speculation, compared=request.stats.rounds == 0)
            trial.requests[request.id] = trial_request
        return trial_request

    def _new_speculation(self, incarnation: int, request: Request, now: float) -> Speculation:
        estimates = self._history(incarnation).estimates(request.task, len(request.tokens))
        return Speculation(
            request.tree.root.id, request.tokens[-1], request.position, estimates, self._strategy.drafts, now
        )

    def _apply_election(self, now: float) -> list[Command]:
        """Follow the election: hand requests over, start the drafts in use, stop the others."""
        active, on_trial = self.election.active, self.election.on_trial if self._guessing else None
        grown = {} if self._trial is None else {self._trial.incarnation: self._trial.requests}
        changed = active != self._active
        if changed:
            if self._active is not None:
                grown[self._active] = {
                    id: TrialRequest(request.speculation, compared=True) for id, request in self._requests.items()
                }
            self._active = active
            own = {} if active is None else grown.get(active, {})
            for request in self._requests.values():
                self._hand_over(request, own.get(request.id), now)
        if on_trial is None:
            self._trial = None
        elif changed or self._trial is None or self._trial.incarnation != on_trial:
            self._trial = Trial(on_trial, grown.get(on_trial))
        commands = [command for request in self._requests.values() for command in self.begin(request, now)]
        unused = [id for id in self._drafts if id not in self._in_use()]
        started = [(id, request) for id in unused for request in self._drafts[id].started]
        return [*commands, *(stop for id, request in started for stop in self._stop(id, request))]

    def _hand_over(self, request: Request, own: TrialRequest | None, now: float) -> None:
        """Give the request the new active draft's speculation, `own` if it exists; without a draft, keep the tree."""
        if self._active is None:
            request.speculation.stop()
        elif own is not None:
            request.speculation = own.speculation
        else:
            request.speculation = self._new_speculation(self._active, request, now)

    def _reconsider(self, request: Request, now: float) -> list[Command]:
        """After a round: replace a silent draft, end a trial that has an outcome, begin one that is due."""
        assert self._active is not None
        election, trial = self.election, self._trial
        before = self._active, election.on_trial
        decided = None
        if self._drafts[self._active].silent(request.estimates, self._reads(self._active, now), now):
            election.active_failed()
        elif not request.estimates.gate.measuring:
            # In such rounds the draft rests: they say nothing of it.
            kind = request.task.sampling.temperature == 0, request.speculation.settled
            ready = trial is None or not self._reads(trial.incarnation, now)
            decided = election.round_ended(*request.ended_round, kind, trial, ready)
        changes = [] if before == (election.active, election.on_trial) else self._apply_election(now)
        return changes if decided is None else [*changes, decided]

    # What drafts are sent ---------------------------------------------------------------------

    def _start(self, id: int, request: Request, now: float) -> list[Command]:
        """Start the request on a draft that does not serve it, unless guesses for it are not wanted."""
        draft, vocabulary = self._drafts[id], self._workers.vocabulary
        speculation = self._speculation(id, request, now)
        estimates = speculation.estimates
        unwanted = not speculation.wanted or estimates.gate.paused
        if not vocabulary or unwanted or too_short(request, draft, estimates, self._sharing):
            return []
        draft.started[request.id] = request.round
        draft.conversations.begun(request.id, draft.earlier(request).held)
        speculation.start(draft.reads(len(request.tokens)), now)
        plan = self._plan(speculation, request)
        start = request.start_message(plan, vocabulary)
        return [SendMessage("draft", start, id)]

    def _reroot(self, id: int, request: Request, tokens: list[int], hit: bool, now: float) -> list[Command]:
        """The request has committed `tokens`. `hit`: the draft's tree has the new root."""
        draft, speculation = self._drafts[id], self._speculation(id, request, now)
        if speculation.estimates.gate.paused:
            speculation.stop()
            return self._stop(id, request.id)
        if request.id not in draft.started:
            return self._start(id, request, now)
        plan = self._plan(speculation, request)
        if not hit and not speculation.resting:
            draft.owes_growth(now)
        # Guesses were given up of the active draft alone.
        anew = request.anew and speculation is request.speculation
        reroot = Reroot(
            request=request.id,
            round=request.round,
            position=request.position - len(tokens),
            tokens=tuple(tokens),
            root=request.tree.root.id,
            missed=not hit,
            plan=plan,
            anew=anew,
        )
        return [SendMessage("draft", reroot, id)]

    def _stop(self, id: int, request: RequestId) -> list[Command]:
        return [SendMessage("draft", Stop(request), id)] if self._drafts[id].stop(request) else []

    def _catch_up(self, id: int, request: Request, now: float) -> list[Command]:
        """Let a draft that a later turn of a conversation was too short for read it after its end, while nothing else
        is to be done: the next turn then finds it read."""
        draft, estimates = self._drafts[id], request.estimates
        declined = request.id not in draft.started and draft.earlier(request).continues and draft.conversations.trusted
        wanted = request.speculation.wanted and not estimates.gate.paused and self._workers.vocabulary
        if not (declined and wanted and estimates.turns.in_turns) or draft.hello.features:
            return []
        draft.catching_up = CatchingUp(request.id, draft.seen(request), draft.earlier(request).held, now, estimates)
        plan = BestFirst(width=1, fan=1, steps=1)
        start = request.start_message(plan, self._workers.vocabulary)
        return [SendMessage("draft", start, id)]

    def _stop_catching_up(self, id: int, now: float, done: bool = False) -> list[Command]:
        """`done`: the draft has read all. A draft keeps what it has read by then."""
        draft = self._drafts[id]
        read, draft.catching_up = draft.catching_up, None
        if read is None:
            return []
        draft.conversations.ended(read.request, read.tokens, len(read.tokens) if done else read.expected(now))
        return [SendMessage("draft", Stop(read.request), id)]

    def _plan(self, speculation: Speculation, request: Request) -> GrowthPlan | None:
        plan = self._strategy.plan(speculation.estimates, self._sharing, request.task.draft_tokens)
        if speculation is not request.speculation and isinstance(plan, BestFirst):
            # Only the active draft is asked for steps: one on trial grows by itself, or rests.
            plan = structs.replace(plan, steps=0 if self.election.alone else None)
        return speculation.follow(plan)

    @property
    def _sharing(self) -> int:
        """Requests whose trees a draft grows."""
        return max(1, sum(request.phase is not Phase.WAITING for request in self._requests.values()))
