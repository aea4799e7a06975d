"""The heart: what happens at a verdict, a growth, a new request, a read prompt, and a worker's end. Pure.

It knows no sockets, clocks, processes or randomness; the same events at the same times give the same commands. It
guarantees that a request's tokens are the target's own, whatever workers do. `machine.py` adds what happens seldom.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Literal

from orchestrator.core.commands import Command, Emit, Finish, Pardon, Ready, Reject, SendMessage, TellReading
from orchestrator.core.drafts.pool import DraftPool
from orchestrator.core.events import Arrived, Ended, Event, Submitted, WorkerDown
from orchestrator.core.meter import Answer, Meter
from orchestrator.core.options import Options
from orchestrator.core.phases import COMPARING, Phase, Trigger
from orchestrator.core.policy.strategies import STRATEGIES
from orchestrator.core.prefills import PrefillRouter
from orchestrator.core.request import Request
from orchestrator.core.scheduler import ResponseTimeouts, Scheduler
from orchestrator.core.workers import FeatureRelay, WorkerRegistry, refusal
from protocol.messages.base import RequestId
from protocol.messages.worker import Forest, Grow, Prefilled, Prefilling, PromptLogprobs, Stop, Verdict
from protocol.speculation.successors import Successors

_FATAL = (
    "Two targets ended while they computed this request, or did nothing for it, so it is not tried again. "
    "`launch-pipeline doctor` says whether memory or the model is the cause."
)


class Rounds:
    """All requests of one pipeline. One forward of the target serves all of them that are ready."""

    def __init__(self, options: Options, profile: str = "", successors: Successors | None = None) -> None:
        """`profile`: name of the device profile that paces the workers, if there is one. `successors`: what the target
        writes, for guesses by prompt lookup."""
        self._successors = successors
        self.strategy = STRATEGIES[options.strategy](options)
        self.requests: dict[RequestId, Request] = {}
        self.stale = 0
        """Messages that were ignored: of an incarnation that is gone, of an old round, of an unknown request."""
        self.meter = Meter(self.requests)
        self.scheduler = Scheduler(self.strategy, options.concurrent, options.turn)
        self.prefills = PrefillRouter(options)
        self._workers = WorkerRegistry(options.context_limit)
        self._timeouts = ResponseTimeouts(self.requests, self._workers)
        self._features = FeatureRelay(self.requests, self._workers)
        self.drafts = DraftPool(self.strategy, self.requests, self._workers, self.meter, options.placement)
        self._profile = profile

    def step(self, event: Event, now: float) -> Ready:
        """Fold one event into the state; return what the runtime must now do."""
        return self._handlers[type(event)](self, event, now)

    def _on_arrived(self, event: Arrived, now: float) -> Ready:
        if not self._workers.note_message(event, now):
            return self._stale()
        handle = self._message_handlers.get((event.role, type(event.message)))
        return Ready([]) if handle is None else handle(self, event.message, event, now)

    # A round

    def _on_verdict(self, verdict: Verdict, by: Arrived, now: float) -> Ready:
        request = self.requests.get(verdict.request)
        if request is None or verdict.bonus >= self._workers.vocabulary or not request.is_answered_by(verdict):
            return self._stale()
        chosen = request.chosen(verdict)
        tokens, reason = request.truncated(chosen)
        request.count_guessed(verdict.path[: len(tokens)])
        width, mode = self.scheduler.verdict_arrived(request.id, now), self.drafts.mode
        answer = self.meter.answered(request, verdict, chosen, reason is not None, width, mode, now)
        if reason is not None:
            self.meter.counted(request, answer, len(tokens), hit=None)
            emit = Emit(request.id, tuple(tokens), token_logprobs=verdict.token_logprobs[: len(tokens)])
            return Ready([emit, *self._finish(request, reason, now), *self._schedule(now)])
        # Other requests could use the time that this one waits, and a draft on trial would be compared unfairly.
        refreshes = self.strategy.refreshes and len(self.requests) == 1 and mode not in COMPARING
        hit = request.commit(tokens, refreshes, now)
        first = [*self._take_turns(request, len(tokens), now), *self._schedule(now)]
        return Ready(first, partial(self._follow, request, answer, hit, now))

    def _follow(self, request: Request, answer: Answer, hit: bool, now: float) -> list[Command]:
        """After a commit, once the target's next round is on its way: the drafts, then the client."""
        tokens, speculation = answer.chosen, request.speculation
        self.meter.counted(request, answer, len(tokens), hit)
        speculation.prune()
        follows = self.drafts.follow(request, tokens, hit, now) if request.phase is not Phase.WAITING else []
        told = hit if self.strategy.caches and request.level != "plain" else None
        emit = Emit(request.id, tuple(tokens), told, answer.verdict.token_logprobs)
        return [*follows, *self.drafts.place(), emit, *self._start_suspect(now)]

    def _on_grow(self, growth: Grow, by: Arrived, now: float) -> Ready:
        if self.drafts.merge_growth(by.incarnation, growth, now):
            return Ready(self._schedule(now))
        caught_up = self.drafts.caught_up(by.incarnation, growth, now)
        return Ready(caught_up) if caught_up else self._stale()

    def _take_turns(self, request: Request, tokens: int, now: float) -> list[Command]:
        """The request got so many tokens: it may have to make room for a waiting one."""
        successor = self.scheduler.preempt(request.id, tokens)
        if successor is not None:
            request.preempt()
            return [*self._stop(request, now), *self._admit(successor, now)]
        return self.drafts.committed(request, now)

    def _schedule(self, now: float) -> list[Command]:
        """Begin the target's next round, or ask resting drafts for growth that it waits for."""
        if self._workers.target is None:
            return []
        trees, awaited = self.scheduler.schedule(self.requests, now)
        if awaited:
            return [command for id, steps in awaited for command in self.drafts.extend(self.requests[id], steps, now)]
        for tree in trees:
            self.drafts.round_sent(self.requests[tree.request])
        if len(trees) < 2:
            return [SendMessage("target", tree) for tree in trees]
        return [SendMessage("target", Forest(tuple(trees)))]

    # A request

    def _on_submitted(self, event: Submitted, now: float) -> Ready:
        estimates = self.drafts.estimates(event.task, len(event.task.tokens))
        request = Request(event.request, event.task, estimates, self.strategy.drafts, now, self._successors)
        self.requests[request.id] = request
        admitted = self.scheduler.add(request.id, event.task.background)
        return Ready(self._admit(request.id, now) if admitted else self._queue())

    def _admit(self, id: RequestId, now: float) -> list[Command]:
        """Start a request that got a place."""
        self.requests[id].enter(Trigger.ADMIT)
        return [*self._start(self.requests[id], now), *self._queue()]

    def _queue(self) -> list[Command]:
        """Tell the clients of requests that wait for their first place."""
        waiting = [self.requests[id] for id in self.scheduler.waiting]
        new = [(place, one) for place, one in enumerate(waiting, 1) if not one.round]
        return [TellReading(one.id, 0, one.position, place) for place, one in new]

    def _start(self, request: Request, now: float) -> list[Command]:
        """Start a request on the target, if one is up, and on the drafts that are in use."""
        target = self._workers.target
        if target is None or (request.suspect and self._suspect_at_work(request)):
            return []
        reason = refusal(request.task, target)
        if reason is not None:
            return self._reject(request, reason, now)
        request.limit_to(target)
        request.outstanding = None
        return [self.prefills.begin(request, now), *self.drafts.begin(request, now)]

    def _on_prefilled(self, message: Prefilled, by: Arrived, now: float) -> Ready:
        request = self._reading(message)
        if request is None or message.tokens + message.adopted > request.position or request.prompt_logprobs_left:
            return self._stale()
        request.prefilled(now)
        self._timeouts.read_on(request, now)
        self.meter.prefilled(request, message, now)
        return Ready([*self._schedule(now), *self.prefills.prefilled(request, message)])

    def _on_ended(self, event: Ended, now: float) -> Ready:
        request = self.requests.get(event.request)
        if request is None:
            return Ready([])
        request.stats.generated -= event.surplus
        return Ready([*self._finish(request, event.reason, now), *self._schedule(now)])

    def _finish(self, request: Request, reason: Literal["stop", "length", "cancelled"], now: float) -> list[Command]:
        strategy, plain = self.strategy, request.plain_tokens_per_second()
        statistics = request.stats.statistics(now, strategy.drafts, strategy.caches, self._profile, plain)
        return [*self._forget(request, now), Finish(request.id, reason, statistics)]

    def _reject(self, request: Request, reason: str, now: float) -> list[Command]:
        """The target can't serve the request."""
        return [*self._forget(request, now), Reject(request.id, reason)]

    def _forget(self, request: Request, now: float) -> list[Command]:
        del self.requests[request.id]
        successor = self.scheduler.remove(request.id)
        commands = [*self._stop(request, now), *([] if successor is None else self._admit(successor, now))]
        return [*commands, *self._start_suspect(now)]

    def _stop(self, request: Request, now: float) -> list[Command]:
        """End a request on all workers."""
        releases = self.prefills.request_ended(request)
        stops: list[Command] = [
            SendMessage(role, Stop(request.id)) for role in ("target", "prefill") if role in self._workers
        ]
        return [*stops, *releases, *self.drafts.request_ended(request, now)]

    # A worker ---------------------------------------------------------------------------------

    # A worker's end

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
        for request in fatal:
            commands += self._reject(request, _FATAL, now)
        return [*commands, Pardon()] if culprits else commands

    def _suspect_at_work(self, besides: Request) -> bool:
        """Whether the target serves another request over which one may have ended. They are served one by one, so that
        the next death shows which one it is."""
        idle = (Phase.WAITING, Phase.ADMITTED)
        return any(one.suspect and one is not besides and one.phase not in idle for one in self.requests.values())

    def _start_suspect(self, now: float) -> list[Command]:
        """Start the next of the suspects that wait for one another."""
        waiting = [one for one in self.requests.values() if one.suspect and one.phase is Phase.ADMITTED]
        return self._start(waiting[0], now) if waiting else []

    # Which requests

    def _running(self) -> list[Request]:
        """Requests that have a place."""
        return [request for request in self.requests.values() if request.phase is not Phase.WAITING]

    def _reading(self, message: Prefilling | PromptLogprobs | Prefilled) -> Request | None:
        """The request whose prompt the target reads, if the message is about it."""
        request = self.requests.get(message.request)
        reads = request is not None and request.phase is Phase.PREFILLING and message.round == request.round
        return request if reads else None

    def _stale(self) -> Ready:
        self.stale += 1
        return Ready([])

    _handlers: ClassVar[dict[type[Any], Callable[[Any, Any, float], Ready]]] = {
        Submitted: _on_submitted,
        Ended: _on_ended,
        Arrived: _on_arrived,
        WorkerDown: _on_worker_down,
    }
    _message_handlers: ClassVar[dict[tuple[str, type[Any]], Callable[[Any, Any, Arrived, float], Ready]]] = {
        ("target", Prefilled): _on_prefilled,
        ("target", Verdict): _on_verdict,
        ("draft", Grow): _on_grow,
    }
