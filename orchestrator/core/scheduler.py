"""Which requests run, whose trees share the target's next forward, and which of its answers are overdue. Pure."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.core.commands import Replace
from orchestrator.core.phases import AWAITING_TARGET, DraftTrigger, Phase
from orchestrator.core.policy.decision import Decision, Strategy, VerifyNodes, WaitUntil
from orchestrator.core.request import Request
from orchestrator.core.tuning import TUNING
from orchestrator.core.workers import WorkerRegistry
from protocol.messages.base import MAX_TREES, RequestId
from protocol.messages.worker import Verify

_BACKGROUND_ROUNDS, _BACKGROUND_TURNS = 4, 8
"""Requests that yield share one of so many rounds with others, and have so many turns in place of one while another
waits for a place. Not tuned."""


@dataclass(slots=True)
class _Round:
    """The trees of one forward."""

    under_verification: set[RequestId]
    """Requests whose verdicts are missing."""
    width: int
    """Tokens of the forward, roots included."""
    deadline: float | None = None
    """When missing verdicts count as lost; None until the first verdict."""


class Scheduler:
    """Requests get places in the order of arrival. The target has one round at a time, for running requests.

    Both are round robin: a running request makes room for a waiting one after `turn` tokens, and running requests that
    do not fit into one forward take turns.
    """

    def __init__(self, strategy: Strategy, places: int, turn: int) -> None:
        """`places`: most requests that run at the same time; `turn`: tokens after which a request makes room."""
        self._strategy = strategy
        self._places = places
        self._turn = turn
        self._running: dict[RequestId, int] = {}
        """Tokens that each running request got since it was admitted."""
        self.waiting: deque[RequestId] = deque()
        self._background: set[RequestId] = set()
        """Requests that yield to the others."""
        self._passed_over = 0
        """Rounds in succession without requests that yield, although these were ready."""
        self._order: deque[RequestId] = deque()
        """All requests, by the time of their last verdict, the oldest first."""
        self._round: _Round | None = None
        self._delayed_since: float | None = None
        """When the next round was first delayed by prompts that the target prefills."""
        self._only_new = False
        """The last round was for new requests alone."""
        self.wake_at: float | None = None
        """When to schedule again, without another event."""

    # Places -----------------------------------------------------------------------------------

    def add(self, request: RequestId, background: bool = False) -> bool:
        """Add a request. Returns whether it has a place at once."""
        if background:
            self._background.add(request)
        self._order.append(request)
        if len(self._running) < self._places:
            self._running[request] = 0
            return True
        self.waiting.append(request)
        return False

    def remove(self, request: RequestId) -> RequestId | None:
        """Remove a request. Returns the waiting request that gets its place, if there is one."""
        self._order.remove(request)
        self._background.discard(request)
        self.expect_no_verdict(request)
        if self._running.pop(request, None) is None:
            self.waiting.remove(request)
            return None
        return self._next_waiting()

    def preempt(self, request: RequestId, tokens: int) -> RequestId | None:
        """A running request got `tokens` more. Returns the waiting request that takes the place if the turn is over."""
        self._running[request] += tokens
        yields = request in self._background and not self._background.issuperset(self.waiting)
        if self._running[request] < self._turn // (_BACKGROUND_TURNS if yields else 1) or not self.waiting:
            return None
        del self._running[request]
        successor = self._next_waiting()
        self.waiting.append(request)
        return successor

    def _next_waiting(self) -> RequestId | None:
        if not self.waiting:
            return None
        successor = next((each for each in self.waiting if each not in self._background), self.waiting[0])
        self.waiting.remove(successor)
        self._running[successor] = 0
        return successor

    # Rounds -----------------------------------------------------------------------------------

    @property
    def under_verification(self) -> frozenset[RequestId]:
        """Requests whose trees are in the target's present forward."""
        return frozenset() if self._round is None else frozenset(self._round.under_verification)

    def verdict_arrived(self, request: RequestId, now: float) -> int | None:
        """Note a verdict. Returns the width of its forward in tokens if it is the first verdict of that forward."""
        self._order.remove(request)
        self._order.append(request)
        round = self._round
        if round is None or request not in round.under_verification:
            return None
        width = round.width if round.deadline is None else None
        round.deadline = round.deadline or now + TUNING.straggler
        self.expect_no_verdict(request)
        return width

    def expect_no_verdict(self, request: RequestId) -> None:
        """No verdict for this request will arrive in the present round."""
        if self._round is not None:
            self._round.under_verification.discard(request)
            if not self._round.under_verification:
                self._round = None

    def lose_target(self) -> None:
        self._round = self.wake_at = None

    def schedule(
        self, requests: Mapping[RequestId, Request], now: float
    ) -> tuple[list[Verify], list[tuple[RequestId, int]]]:
        """Put the trees of the next forward under verification. None while the target is busy or waiting pays; then
        with growth that resting drafts are asked for: up to so many steps below a request's root."""
        self.wake_at = None
        ready = [requests[id] for id in self._order if requests[id].phase is Phase.READY][:MAX_TREES]
        if self._busy(now) or not ready or self._prefill_first(requests, now):
            return [], []
        shared, others = ready, self._without_background(ready)
        ready = _together(others)
        trees: list[Verify] = []
        awaited: list[tuple[RequestId, int]] = []
        decisions = self._decisions(ready, now)
        # A request that does not share this round would wait for a next one that begins before it is asked for.
        goes_on = len(decisions) == len(self._running) and all(
            isinstance(decision, VerifyNodes) and decision.goes_on for _, decision in decisions
        )
        for request, decision in decisions:
            match decision:
                case VerifyNodes(nodes, draft_silent):
                    if draft_silent:
                        request.speculation.enter(DraftTrigger.WAIT_IN_VAIN)
                    trees.append(request.verify(nodes, now, goes_on))
                case WaitUntil(until, steps, instead):
                    self.wake_at = until if self.wake_at is None else min(until, self.wake_at)
                    if steps is not None:
                        request.instead = request.instead or (instead if len(decisions) == 1 else None)
                        awaited.append((request.id, steps))
        if trees:
            self._round = _Round({tree.request for tree in trees}, sum(len(tree.tokens) for tree in trees))
            self.wake_at = None
            self._passed_over = self._passed_over + 1 if len(others) < len(shared) else 0
        return trees, [] if trees else awaited

    def _decisions(self, ready: list[Request], now: float) -> list[tuple[Request, Decision]]:
        """The next round's requests, each with a decision.

        Requests without a token go before the others, by plain decoding: the round is short, and their first token
        early. Never twice in a row, or a stream of new requests would starve the others. Beside a target that verifies
        no guesses the strategy is not asked.
        """
        new = [request for request in ready if not request.round]
        self._only_new = 0 < len(new) < len(ready) and not self._only_new
        if self._only_new:
            return [(request, VerifyNodes([])) for request in new]
        if ready[0].level == "plain":
            return [(request, VerifyNodes([], goes_on=True)) for request in ready]
        decisions = self._strategy.decide(ready, now)
        return list(zip(ready, decisions, strict=True))

    def _without_background(self, ready: list[Request]) -> list[Request]:
        """Those of `ready` that yield take part in one of so many rounds."""
        others = [request for request in ready if request.id not in self._background]
        return others if others and self._passed_over < _BACKGROUND_ROUNDS - 1 else ready

    def _busy(self, now: float) -> bool:
        """Whether verdicts of the present round are missing and not overdue."""
        if self._round is None:
            return False
        if self._round.deadline is not None and now >= self._round.deadline:
            self._round = None
            return False
        self.wake_at = self._round.deadline
        return True

    def _prefill_first(self, requests: Mapping[RequestId, Request], now: float) -> bool:
        """Whether a prompt that the target prefills delays the next round."""
        reading = {request.id for request in requests.values() if request.phase is Phase.PREFILLING}
        if not reading - self._background:
            self._delayed_since = None
            return False
        self._delayed_since = now if self._delayed_since is None else self._delayed_since
        until = self._delayed_since + TUNING.prefill_priority
        if now >= until:
            self._delayed_since = None
            return False
        self.wake_at = until
        return True


def _together(ready: list[Request]) -> list[Request]:
    """Those of `ready` that share the next forward. Who shares none has rounds of its own, in its turn."""
    return ready[:1] if ready[0].alone else [request for request in ready if not request.alone]


class ResponseTimeouts:
    """Timeouts of the target's answers; none while no target is up."""

    def __init__(self, requests: Mapping[RequestId, Request], workers: WorkerRegistry) -> None:
        self._requests = requests
        self._workers = workers

    def deadline(self) -> float | None:
        """When the first answer is overdue."""
        return min(map(_due_at, self._awaiting()), default=None)

    def overdue(self, now: float) -> tuple[list[Request], list[Request], Replace | None]:
        """Requests that are to be sent the same again, and those to be started again, once the target is replaced, if
        it is. Their timeouts begin again.

        A target that says nothing computes, until it is silent for too long. One that says something else has read what
        it was sent: it is asked again, and then the round is lost.
        """
        late = [request for request in self._awaiting() if now >= _due_at(request)]
        if any(now >= _due_at(request) + TUNING.standstill for request in late):
            self._workers.listen_again(now)
        silence = self._workers.silence("target", now) if late else None
        reason = "" if silence is None else f"The target has been silent for {silence:.0f} s."
        again, lost = list[Request](), list[Request]()
        for request in late:
            heard, request.sent_at = self._workers.heard_since("target", request.sent_at), now
            request.unanswered += heard
            if request.unanswered >= TUNING.unanswered:
                request.fruitless += 1
                lost.append(request)
                if request.fruitless % TUNING.fruitless_rounds == 0:
                    reason = "The target did nothing for a request."
            elif heard:
                again.append(request)
        replace = Replace("target", self._workers.incarnation("target"), reason) if reason else None
        return again, lost, replace

    def read_on(self, request: Request, now: float) -> None:
        """The target has read more of this prompt. Other prompts have not waited in vain: they take turns.

        Nor have trees, where it has read all: it may have done so before it saw them.
        """
        request.sent_at, ready = now, request.phase is Phase.READY
        for each in self._awaiting():
            if each.unanswered < TUNING.unanswered and (ready or each.phase is Phase.PREFILLING):
                each.unanswered = 0

    def _awaiting(self) -> list[Request]:
        if "target" not in self._workers:
            return []
        return [request for request in self._requests.values() if request.phase in AWAITING_TARGET]


def _due_at(request: Request) -> float:
    return request.sent_at + (TUNING.answer if request.unanswered < TUNING.unanswered else TUNING.restart_pause)
