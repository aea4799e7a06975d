"""From a traced run and its replays to the figures of a profile. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import msgspec

from orchestrator.lab.profile.analysis.overlap import (
    DRAFT_WORK,
    TARGET_WORK,
    DraftTime,
    Interval,
    Intervals,
    Repeat,
    TracedRequest,
    TracedStep,
    VerificationRound,
    acceptance_by_depth,
    difference,
    draft_time,
    edges,
    efficiency,
    intersection,
    overlapped_share,
    rounds,
    time_alone,
    total,
    traced_requests,
    union,
    work,
)
from orchestrator.lab.profile.run import TracedRun, WorkerLife
from protocol.messages.base import Role
from protocol.messages.client import Statistics
from protocol.messages.worker import Prefilled, Start, Verdict, Verify
from protocol.worker.spans import SpanKind

_TRAVELLING, _HELD = "messaging", "orchestrator"


@dataclass(frozen=True, slots=True)
class TargetTime:
    """Nanoseconds from a request's start at the target to its last verdict. All fields together are that time."""

    prefill: int
    verify: int
    tidy: int
    for_draft: int
    """Idle, because the orchestrator awaited growth."""
    for_prefill: int
    """Idle, because the orchestrator awaited growth of a draft that still prefilled the prompt."""
    for_orchestrator: int
    """Idle, because the orchestrator had an answer and had not sent the next verification."""
    for_messages: int
    """Idle, because a message was being encoded, on its way, or waiting to be read."""

    @property
    def busy(self) -> int:
        return self.prefill + self.verify + self.tidy

    @property
    def idle(self) -> int:
        return self.for_draft + self.for_prefill + self.for_orchestrator + self.for_messages


def target_time(request: TracedRequest, within: Intervals) -> TargetTime:
    """`within`: the time that is counted, for instance `request.all`."""
    idle = idle_by_cause(request, within)
    verify = request.busy(work(request.target, (SpanKind.VERIFY,)), within)
    prefill = difference(request.busy(work(request.target, (SpanKind.PREFILL,)), within), verify)
    busy = request.busy(request.target, within)
    return TargetTime(
        prefill=total(prefill),
        verify=total(verify),
        tidy=total(busy) - total(verify) - total(prefill),
        **{f"for_{cause}": total(moments) for cause, moments in idle.items()},
    )


def idle_by_cause(request: TracedRequest, within: Intervals) -> dict[str, Intervals]:
    """The idle moments by cause, without overlaps: draft, prefill, orchestrator, messages."""
    idle = difference(within, request.busy(request.target, within))
    waiting = intersection(idle, union(edges(span) for span in request.waits))
    reading = request.busy(work(request.draft, (SpanKind.PREFILL,)), within)
    held = union((begin, end) for begin, end, where in _stations(request) if where == _HELD)
    rest = difference(idle, waiting)
    return {
        "draft": difference(waiting, reading),
        "prefill": intersection(waiting, reading),
        "orchestrator": intersection(rest, held),
        "messages": difference(rest, held),
    }


def _stations(request: TracedRequest) -> Iterator[tuple[int, int, str]]:
    """The places of the request with their begin and end."""
    events = [(span.end, _TRAVELLING) for span in work(request.target, (SpanKind.VERIFY, SpanKind.PREFILL))]
    for seen in request.seen:
        if isinstance(seen.message, Verdict | Prefilled):
            events.append((seen.at, _HELD))
        elif isinstance(seen.message, Verify | Start):
            events.append((seen.at, _TRAVELLING))
    events.sort()
    events.append((request.ended, _TRAVELLING))
    for (begin, where), (end, _) in pairwise(events):
        yield begin, end, where


class RoundRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One round. Times in seconds."""

    round: int
    began: float
    """Since the request's first round; when the orchestrator began to send the verification."""
    nodes: int
    """Draft tokens under verification."""
    accepted: int
    hit: bool | None
    verify: float
    idle_before: dict[str, float]
    """How long the target had been idle since the last verdict, by cause."""
    steps: int
    """Growth steps that published the nodes under verification."""
    used_steps: int
    """Growth steps that its accepted tokens came from or that led to them."""


class RequestProfile(msgspec.Struct, frozen=True, kw_only=True):
    """One request, the last of its temperature. Times in seconds; None where the strategy has no such thing."""

    temperature: float
    tokens_per_second: float
    tokens: int
    tokens_per_round: float
    hit_rate: float | None
    acceptance_rate: float | None
    acceptance_by_depth: tuple[float, ...]
    seconds: float
    """Of decoding: from the end of the target's prefill to its last verdict; T_both. A median of all repeats, as are
    T_draft and T_target."""
    draft_alone: float | None
    """T_draft: the same growth steps replayed alone."""
    target_alone: float | None
    """T_target: the same verifications replayed alone."""
    repeats: int = 1
    overlap_efficiency: float | None = None
    """None also where the repeats do not tell it."""
    overlap_efficiency_interval: tuple[float, float] | None = None
    """95%."""
    overlapped_share: float | None
    useful_overlap: float | None
    target: dict[str, float]
    draft: dict[str, float]
    rounds: tuple[RoundRecord, ...]

    @property
    def undecided(self) -> bool:
        """Draft and target worked, and the repeats do not tell how much of that was hidden."""
        return bool(self.draft_alone and self.target_alone) and self.overlap_efficiency is None


class ProfileFigures(msgspec.Struct, frozen=True, kw_only=True, rename={"requests": "accounts"}):
    """The figures of all requests. The field `requests` has the key "accounts" in JSON."""

    strategy: str
    machine: tuple[str, ...]
    prompt_tokens: int
    clock_error: float | None
    """Maximum error between the clocks of two processes, in seconds."""
    lost: int
    """Spans and messages that were overwritten by newer ones; their rounds are not accounted for."""
    notes: tuple[str, ...]
    """Conditions that make figures invalid or incomplete."""
    requests: tuple[RequestProfile, ...]


def request_profiles(
    run: TracedRun, replays: Mapping[str, WorkerLife], statistics: Sequence[Statistics]
) -> list[RequestProfile]:
    """One for each request, in order. `replays`: lives by name; `statistics`: of the run's last requests."""
    measured = traced_requests(run)[-len(statistics) :]
    return [
        _request_profile(run, request, replays, figures) for request, figures in zip(measured, statistics, strict=True)
    ]


def repeated(profiles: Sequence[RequestProfile]) -> RequestProfile:
    """The last one of equal requests, with the times of all."""
    drafts = [each.draft_alone for each in profiles if each.draft_alone is not None]
    targets = [each.target_alone for each in profiles if each.target_alone is not None]
    both = [each.seconds for each in profiles]
    whole = len(drafts) == len(targets) == len(both)
    found = efficiency(list(map(Repeat, drafts, targets, both))) if whole else None
    return msgspec.structs.replace(
        profiles[-1],
        seconds=median(both),
        draft_alone=median(drafts) if drafts else None,
        target_alone=median(targets) if targets else None,
        repeats=len(profiles),
        overlap_efficiency=found and found[0],
        overlap_efficiency_interval=found and found[1:],
    )


def grown_by(run: TracedRun) -> dict[Interval, TracedStep]:
    """Which step each growth span was."""
    return {
        edges(span): TracedStep(life.worker.incarnation, span.serial)
        for life in run.lives
        for span in life.spans
        if span.kind is SpanKind.GROW
    }


def _request_profile(
    run: TracedRun, request: TracedRequest, replays: Mapping[str, WorkerLife], figures: Statistics
) -> RequestProfile:
    done = rounds(request.seen)
    draft = draft_time(request, grown_by(run), set().union(*(each.used for each in done)))
    target_busy = request.busy(work(request.target, TARGET_WORK), request.decode)
    draft_busy = request.busy(work(request.draft, DRAFT_WORK), request.decode)
    alone = {role: _alone(run, request, replays, role) for role in ("target", "draft")}
    return RequestProfile(
        temperature=request.temperature,
        tokens_per_second=figures.tokens_per_second,
        tokens=figures.generated_tokens,
        tokens_per_round=figures.tokens_per_round,
        hit_rate=figures.hit_rate,
        acceptance_rate=figures.acceptance_rate,
        acceptance_by_depth=acceptance_by_depth(done),
        seconds=total(request.decode) / 1e9,
        draft_alone=_seconds(alone["draft"]),
        target_alone=_seconds(alone["target"]),
        overlapped_share=overlapped_share(draft_busy, target_busy),
        useful_overlap=draft.used / draft.busy if draft.busy else None,
        target=_target(target_time(request, request.all)),
        draft=_draft(draft),
        rounds=tuple(_records(request, done)),
    )


def _alone(run: TracedRun, request: TracedRequest, replays: Mapping[str, WorkerLife], role: Role) -> int | None:
    """Nanoseconds that a role's work in this request takes alone."""
    lives = [life for life in run.lives if life.worker.role == role and life.spans]
    kinds = TARGET_WORK if role == "target" else DRAFT_WORK
    times = [
        time_alone(life, replays[life.name], kinds, request.decode) if life.name in replays else None for life in lives
    ]
    known = [time for time in times if time is not None]
    return sum(known) if times and len(known) == len(times) else None


def _records(request: TracedRequest, done: Sequence[VerificationRound]) -> list[RoundRecord]:
    spans = {span.round: span for span in reversed(work(request.target, (SpanKind.VERIFY,)))}
    idle = idle_by_cause(request, request.decode)
    records = []
    free_at = request.decoding
    for each in done:
        span = spans.get(each.round)
        if span is None:
            continue
        before = {cause: total(intersection(times, [(free_at, span.begin)])) / 1e9 for cause, times in idle.items()}
        free_at = span.end
        records.append(
            RoundRecord(
                round=each.round,
                began=(each.asked - done[0].asked) / 1e9,
                nodes=each.nodes,
                accepted=each.accepted,
                hit=each.hit,
                verify=span.length / 1e9,
                idle_before=before,
                steps=len(each.sources),
                used_steps=len(each.used),
            )
        )
    return records


def _target(time: TargetTime) -> dict[str, float]:
    names = ("prefill", "verify", "tidy", "for_draft", "for_prefill", "for_orchestrator", "for_messages")
    return {name: getattr(time, name) / 1e9 for name in names}


def _draft(time: DraftTime) -> dict[str, float]:
    return {name: getattr(time, name) / 1e9 for name in ("used", "discarded", "exposed", "prefill", "idle")}


def _seconds(nanoseconds: int | None) -> float | None:
    return None if nanoseconds is None else nanoseconds / 1e9
