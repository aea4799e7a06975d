"""What subscribers see of the pipeline: a recorder of recent events, snapshots of requests, due times. Pure.

The state machine does not know the recorder, and nothing here changes what the state machine does. Without a subscriber
nothing is recorded.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from orchestrator.core.commands import Command, Emit, Finish, SendMessage
from orchestrator.core.events import Arrived, Event
from orchestrator.core.machine import Machine
from orchestrator.core.phases import Phase
from orchestrator.core.request import Request
from orchestrator.core.request_stats import RequestStats
from protocol.messages.base import NodeId, RequestId
from protocol.messages.telemetry import (
    MAX_CHARACTERS,
    MAX_DEPTHS,
    MAX_ENDED,
    MAX_NODES,
    MAX_REQUESTS,
    MAX_ROUNDS,
    MAX_SPANS,
    FinishedRequest,
    RequestSnapshot,
    RequestSummary,
    TelemetryFrame,
    TreeSnapshot,
    VerifiedRound,
    Watch,
    WorkerSummary,
    WorkSpan,
)
from protocol.messages.worker import Forest, Grow, Prefilled, Verdict, Verify
from protocol.shown_names import device_name, model_name
from protocol.speculation.token_tree import Node, TokenTree, node_id

T = TypeVar("T")
Subscriber = TypeVar("Subscriber")

_MAX_SECONDS = 60.0
"""Longest span: a worker may report any duration."""
MAX_SUBSCRIBERS = 16
FRAME_INTERVAL = 0.05
"""Seconds between two frames, to whichever subscriber: building one takes longer than a round's other work."""
_IDLE_INTERVAL = 1.0
"""Seconds after which a subscriber gets a frame although nothing happened."""
_LINGER = 3.0
"""Seconds after the last Watch for which events are still recorded."""
_LAST_TOKENS = 24
_KEY_MASK = (1 << 53) - 1
"""JavaScript's numbers hold 53 bits."""
_PHASES: Mapping[Phase, Literal["waiting", "prefilling", "ready", "verifying"]] = {
    Phase.WAITING: "waiting",
    Phase.ADMITTED: "prefilling",
    Phase.DELEGATED: "prefilling",
    Phase.PREFILLING: "prefilling",
    Phase.READY: "ready",
    Phase.VERIFYING: "verifying",
}


class TelemetryRecorder:
    """Holds a bounded number of spans and rounds. Each has a serial number, so that every subscriber gets those that
    are new to it."""

    def __init__(self, machine: Machine, text: Callable[[int], str]) -> None:
        """`text` gives the text of a single token."""
        self.serial = 1
        """Counts recorded events; it stands still while nothing is recorded."""
        self._machine = machine
        self._text: Callable[[int], str] = lambda token: text(token)[:MAX_CHARACTERS]
        self._spans: deque[tuple[int, WorkSpan]] = deque(maxlen=2 * MAX_SPANS)
        self._verified: deque[tuple[int, VerifiedRound]] = deque(maxlen=2 * MAX_ROUNDS)
        self._ended: deque[tuple[int, FinishedRequest]] = deque(maxlen=MAX_ENDED)
        self._outstanding: dict[RequestId, tuple[Verify, TreeSnapshot]] = {}
        """What is under verification, and the tree at the moment when it was sent."""

    def clear(self) -> None:
        """Forget everything: the last subscriber has left."""
        self._spans.clear()
        self._verified.clear()
        self._ended.clear()
        self._outstanding.clear()

    def record(self, event: Event, commands: Items[Command], now: float) -> None:
        """Record that the state machine answered `event` with `commands`."""
        self.serial += 1
        if isinstance(event, Arrived):
            self._record_result(event, commands, now)
        for command in commands:
            for verify in _verifies(command):
                self._record_verify(verify)
            if isinstance(command, Finish):
                ended = FinishedRequest(request=command.request, end=now, statistics=command.statistics)
                self._ended.append((self.serial, ended))

    def frame(self, after: int, wanted: RequestId | None, now: float) -> TelemetryFrame:
        """What happened after the serial number `after`, and the present state; `wanted` is the request to select."""
        # A serial number of an earlier orchestrator process means nothing here.
        after = after if after <= self.serial else 0
        spans, verified = _since(self._spans, after), _since(self._verified, after)
        selected = self._selected(wanted)
        requests = self._machine.requests
        self._outstanding = {id: sent for id, sent in self._outstanding.items() if id in requests}
        return TelemetryFrame(
            serial=self.serial,
            at=now,
            dropped=max(0, len(spans) - MAX_SPANS) + max(0, len(verified) - MAX_ROUNDS),
            uses_draft=self._machine.strategy.drafts,
            workers=tuple(self._workers()),
            requests=request_list(requests, selected),
            selected=None if selected is None else snapshot(selected, self._text),
            verified=tuple(verified[-MAX_ROUNDS:]),
            spans=tuple(spans[-MAX_SPANS:]),
            ended=tuple(_since(self._ended, after)),
        )

    # What happened ----------------------------------------------------------------------------

    def _record_result(self, event: Arrived, commands: Items[Command], now: float) -> None:
        match event.message:
            case Grow() as growth if growth.evaluated:
                self._record_span(event, "grow", growth.request, growth.seconds, growth.evaluated, now)
            case Prefilled() as prefilled if prefilled.tokens:
                self._record_span(event, "prefill", prefilled.request, prefilled.seconds, prefilled.tokens, now)
            case Verdict() as verdict:
                emitted = [one for one in commands if isinstance(one, Emit) and one.request == verdict.request]
                # A verdict without an Emit was stale: it committed nothing.
                if emitted:
                    self._record_round(event, verdict, emitted[0], now)
            case _:
                pass

    def _record_verify(self, verify: Verify) -> None:
        request = self._machine.requests.get(verify.request)
        if request is not None:
            tree = verification_snapshot(verify, request.tree, self._text)
            self._outstanding[verify.request] = verify, tree

    def _record_round(self, event: Arrived, verdict: Verdict, emit: Emit, now: float) -> None:
        outstanding = self._outstanding.pop(verdict.request, None)
        if outstanding is None or outstanding[0].round != verdict.round:
            # The Verify was sent before recording began.
            return
        verify, tree = outstanding
        accepted = len(verdict.path)
        self._record_span(event, "verify", verify.request, verdict.seconds, len(verify.tokens), now, accepted)
        verified = VerifiedRound(
            request=verify.request,
            round=verify.round,
            begin=now - min(verdict.seconds, _MAX_SECONDS),
            end=now,
            tree=tree,
            width=len(verify.tokens),
            accepted=_accepted(verify, verdict, len(tree.texts)),
            committed=len(emit.tokens),
            bonus=self._text(verdict.bonus),
            hit=emit.hit,
        )
        self._verified.append((self.serial, verified))

    def _record_span(
        self,
        event: Arrived,
        kind: Literal["grow", "verify", "prefill"],
        request: RequestId,
        seconds: float,
        tokens: int,
        now: float,
        accepted: int = 0,
    ) -> None:
        span = WorkSpan(
            role=event.role,
            incarnation=event.incarnation,
            kind=kind,
            request=request,
            begin=now - min(seconds, _MAX_SECONDS),
            end=now,
            tokens=tokens,
            accepted=accepted,
        )
        self._spans.append((self.serial, span))

    # The present state ------------------------------------------------------------------------

    def _selected(self, wanted: RequestId | None) -> Request | None:
        """The wanted request, or else the latest."""
        requests = self._machine.requests
        if wanted is not None and wanted in requests:
            return requests[wanted]
        return requests[max(requests)] if requests else None

    def _workers(self) -> Iterable[WorkerSummary]:
        statuses = self._machine.drafts.statuses()
        for incarnation, hello, remote in self._machine.workers():
            yield WorkerSummary(
                role=hello.role,
                incarnation=incarnation,
                engine=hello.engine,
                model=model_name(hello.model),
                device=device_name(hello.device),
                remote=remote,
                status=statuses.get(incarnation) if hello.role == "draft" else None,
            )


def _verifies(command: Command) -> tuple[Verify, ...]:
    """All Verify messages that a command sends to the target."""
    match command:
        case SendMessage("target", Verify() as verify):
            return (verify,)
        case SendMessage("target", Forest(trees)):
            return trees
        case _:
            return ()


def _since(recorded: Iterable[tuple[int, T]], after: int) -> list[T]:
    return [one for serial, one in recorded if serial > after]


def _accepted(verify: Verify, verdict: Verdict, entries: int) -> tuple[int, ...]:
    """The accepted path as entries of the verified tree, whose first `entries` nodes are in the snapshot."""
    ids = [verify.root]
    for token, parent in zip(verify.tokens[1:entries], verify.parents[1:entries], strict=True):
        ids.append(node_id(ids[parent], token))
    index = {id: entry for entry, id in enumerate(ids)}
    return tuple(index[id] for id in verdict.path if id in index)


@dataclass(frozen=True, slots=True)
class _Pending:
    watch: Watch
    at: float


class Subscribers(Generic[Subscriber]):
    """Each Watch is answered once: a subscriber that is slow to ask again misses frames and delays no other."""

    def __init__(self, recorder: TelemetryRecorder) -> None:
        self._recorder = recorder
        self._pending: dict[Subscriber, _Pending] = {}
        self._last_frame_at = 0.0
        self._record_until: float | None = None
        """None while there is no subscriber."""

    @property
    def active(self) -> bool:
        """Whether events have to be recorded."""
        return self._record_until is not None

    def ask(self, subscriber: Subscriber, watch: Watch, now: float) -> None:
        """Replace the subscriber's pending Watch. Beyond MAX_SUBSCRIBERS the oldest pending Watch is dropped."""
        self._pending.pop(subscriber, None)
        self._pending[subscriber] = _Pending(watch, now)
        if len(self._pending) > MAX_SUBSCRIBERS:
            del self._pending[next(iter(self._pending))]
        self._record_until = now + _LINGER

    def record(self, event: Event, commands: Items[Command], now: float) -> None:
        """Record a step of the state machine; to be called only while `active`."""
        self._recorder.record(event, commands, now)

    def deadline(self) -> float | None:
        """When `due` must be called at the latest."""
        if self._record_until is None:
            return None
        return min([self._record_until, *map(self._due_at, self._pending.values())])

    def due(self, now: float) -> list[tuple[Subscriber, TelemetryFrame]]:
        """The frames to send now. Forgets everything when the last Watch is too long ago."""
        if self._record_until is not None and now >= self._record_until:
            self._record_until = None
            self._recorder.clear()
            self._pending.clear()
        ready = [subscriber for subscriber, pending in self._pending.items() if now >= self._due_at(pending)]
        if not ready:
            return []
        self._last_frame_at = now
        watches = [(subscriber, self._pending.pop(subscriber).watch) for subscriber in ready]
        return [(subscriber, self._recorder.frame(watch.after, watch.request, now)) for subscriber, watch in watches]

    def _due_at(self, pending: _Pending) -> float:
        changed = self._recorder.serial != pending.watch.after
        return self._last_frame_at + FRAME_INTERVAL if changed else pending.at + _IDLE_INTERVAL


def snapshot(request: Request, text: Callable[[int], str]) -> RequestSnapshot:
    """`text` gives the text of a single token."""
    stats = request.stats
    builder = _TreeBuilder(request.tree, text)
    verifying = builder.add_verified(request.outstanding) if request.outstanding is not None else ()
    builder.fill()
    last_tokens = request.tokens[-_LAST_TOKENS:]
    decode_seconds = 0.0
    if stats.decode_began_at is not None and stats.last_token_at is not None:
        decode_seconds = max(0.0, stats.last_token_at - stats.decode_began_at)
    return RequestSnapshot(
        request=request.id,
        round=request.round,
        last_tokens=tuple(text(token) for token in last_tokens),
        prompt_part=max(0, len(last_tokens) - (len(request.tokens) - len(request.task.tokens))),
        tree=builder.snapshot(),
        verifying=verifying,
        nodes=len(request.tree),
        prompt_tokens=stats.prompt_tokens,
        adopted_tokens=stats.adopted,
        prefill_seconds=stats.prefill_seconds,
        generated_tokens=stats.generated,
        decode_seconds=decode_seconds,
        rounds=stats.rounds,
        hits=stats.hits,
        hit_chances=stats.hit_chances,
        overlapped_rounds=stats.overlapped_rounds,
        accepted=_depths(stats, "accepted"),
        tried=_depths(stats, "tried"),
        target_seconds=stats.target_seconds,
        draft_seconds=stats.draft_seconds,
        plain_tokens_per_second=request.plain_tokens_per_second(),
    )


def verification_snapshot(verify: Verify, tree: TokenTree, text: Callable[[int], str]) -> TreeSnapshot:
    """The nodes under verification, with their probabilities in `tree`."""
    builder = _TreeBuilder(tree, text)
    builder.add_verified(verify)
    return builder.snapshot()


def request_list(requests: Mapping[RequestId, Request], selected: Request | None) -> tuple[RequestSummary, ...]:
    """The oldest requests, and the selected one."""
    listed = list(requests.values())[:MAX_REQUESTS]
    if selected is not None and selected not in listed:
        listed[-1] = selected
    return tuple(
        RequestSummary(
            request=one.id,
            name=one.task.name,
            phase=_PHASES[one.phase],
            generated_tokens=one.stats.generated,
        )
        for one in listed
    )


class _TreeBuilder:
    """Collects nodes of one tree, parents first."""

    def __init__(self, tree: TokenTree, text: Callable[[int], str]) -> None:
        self._tree = tree
        self._text = text
        self._index: dict[NodeId, int] = {}
        self._texts: list[str] = []
        self._parents: list[int] = []
        self._probabilities: list[float | None] = []
        self._path_probabilities: list[float] = []
        self._put(tree.root.id, tree.root.token, -1, 1.0, 1.0)

    def add_verified(self, verify: Verify) -> tuple[int, ...]:
        """Add the nodes under verification and return their entries; nothing if `verify` has another root."""
        if verify.root != self._tree.root.id:
            return ()
        ids = [verify.root]
        for token, parent in zip(verify.tokens[1:MAX_NODES], verify.parents[1:MAX_NODES], strict=True):
            ids.append(node_id(ids[parent], token))
            node = self._tree.get(ids[-1])
            if node is not None:
                self._put_node(node)
            else:
                # A token from prompt lookup: the tree holds only what the draft grew.
                above = self._index[ids[parent]]
                self._put(ids[-1], token, above, None, self._path_probabilities[above])
        return tuple(self._index[id] for id in ids)

    def fill(self) -> None:
        """Add the most probable nodes, up to MAX_NODES."""
        for node in self._tree.best():
            if len(self._texts) == MAX_NODES:
                return
            if node.id not in self._index:
                self._put_node(node)

    def snapshot(self) -> TreeSnapshot:
        return TreeSnapshot(
            keys=tuple(id & _KEY_MASK for id in self._index),
            texts=tuple(self._texts),
            parents=tuple(self._parents),
            probabilities=tuple(self._probabilities),
            path_probabilities=tuple(self._path_probabilities),
        )

    def _put_node(self, node: Node) -> None:
        assert node.parent is not None
        path_probability = self._tree.path_probability(node)
        self._put(node.id, node.token, self._index[node.parent.id], min(1.0, node.probability), path_probability)

    def _put(self, id: NodeId, token: int, parent: int, probability: float | None, path_probability: float) -> None:
        self._index[id] = len(self._texts)
        self._texts.append(self._text(token))
        self._parents.append(parent)
        self._probabilities.append(None if probability is None else round(probability, 4))
        self._path_probabilities.append(round(path_probability, 5))


def _depths(stats: RequestStats, which: Literal["accepted", "tried"]) -> tuple[int, ...]:
    counts = stats.accepted if which == "accepted" else stats.tried
    return tuple(counts[depth] for depth in range(1, min(len(stats.tried), MAX_DEPTHS) + 1))
