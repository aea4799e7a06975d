"""From a traced run and its replays to the figures of a profile. Pure."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import fmean, median

import msgspec

from orchestrator.core.events import Arrived, Event, Submitted
from orchestrator.core.machine import Machine
from orchestrator.core.options import Options
from orchestrator.lab.findings import Column, Table
from orchestrator.lab.profile.overlap import (
    DRAFT_WORK,
    TARGET_WORK,
    Interval,
    Intervals,
    Repeat,
    TracedRequest,
    TracedStep,
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
from protocol.speculation.successors import Successors
from protocol.worker.spans import SpanKind

_TRAVELLING, _HELD = "messaging", "orchestrator"


def target_time(request: TracedRequest) -> dict[str, int]:
    """Nanoseconds from the request's start at the target to its last verdict, by use; all together are that time."""
    verify = request.busy(work(request.target, (SpanKind.VERIFY,)), request.all)
    prefill = difference(request.busy(work(request.target, (SpanKind.PREFILL,)), request.all), verify)
    busy = request.busy(request.target, request.all)
    return {
        "prefill": total(prefill),
        "verify": total(verify),
        "tidy": total(busy) - total(verify) - total(prefill),
        **{f"for_{cause}": total(moments) for cause, moments in idle_by_cause(request).items()},
    }


def idle_by_cause(request: TracedRequest) -> dict[str, Intervals]:
    """The target's idle moments by cause, without overlaps.

    draft: the orchestrator awaited growth; prefill: growth of a draft that still read the prompt; orchestrator: it had
    an answer and had not sent the next verification; messages: one was being encoded, on its way, or not yet read.
    """
    idle = difference(request.all, request.busy(request.target, request.all))
    waiting = intersection(idle, union(edges(span) for span in request.waits))
    reading = request.busy(work(request.draft, (SpanKind.PREFILL,)), request.all)
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


class RequestProfile(msgspec.Struct, frozen=True, kw_only=True):
    """One request, the last of its temperature. Times in seconds; None where the strategy has no such thing."""

    temperature: float
    tokens_per_second: float
    tokens_per_round: float
    hit_rate: float | None
    acceptance_rate: float | None
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
    """By use, as `target_time`."""
    draft: dict[str, float]
    """By use, as `draft_time`."""

    @property
    def undecided(self) -> bool:
        """Draft and target worked, and the repeats do not tell how much of that was hidden."""
        return bool(self.draft_alone and self.target_alone) and self.overlap_efficiency is None


_EXPECTED = (
    Column("T", "g"),
    "tree",
    "lookup",
    "rounds",
    Column("expected tokens", ".2f"),
    Column("came", ".2f"),
    Column("expected ms", ".1f", "from a tree to its verdict"),
    Column("took", ".1f"),
    Column("waited", ".1f", "ms before the tree, for the draft"),
)


def expected_rounds(
    events: Sequence[tuple[Event, float]], options: Options, last: int, successors: Successors | None = None
) -> Table:
    """Rounds as the strategy expected them and as they came, in means by the tree and by whether prompt lookup had a
    guess behind the root. Of the `last` requests, which were served one by one, by a replay of a recorded pipeline: at
    a verdict the strategy's figures are still those that it has decided by."""
    requests = [event.request for event, _ in events if isinstance(event, Submitted)][-last:]
    machine = Machine(options, successors=successors)
    kinds = defaultdict[tuple[float, str, int, bool], list[tuple[float, ...]]](list)
    for event, now in events:
        verdict = event.message if isinstance(event, Arrived) else None
        request = machine.requests.get(verdict.request) if isinstance(verdict, Verdict) else None
        if isinstance(verdict, Verdict) and request and request.id in requests and request.is_answered_by(verdict):
            assert request.outstanding is not None
            depths = [0]
            for parent in request.outstanding.parents[1:]:
                depths.append(depths[parent] + 1)
            round, estimates = request.measured(verdict, now), request.estimates
            expected = estimates.target(len(depths)) + estimates.hop.get(0.0)
            times = (1e3 * seconds for seconds in (expected, round.seconds - round.waited, round.waited))
            figures = round.tokens, len(verdict.path) + 1, *times
            heat, guess = request.task.sampling.temperature, bool(request.guesses_behind(request.tree.root))
            for by, size in (("depth", max(depths)), ("width", len(depths))):
                kinds[heat, by, size and 1 << (size - 1).bit_length(), guess].append(figures)
        machine.step(event, now).all()
    rows = (
        (heat, f"{by} {_up_to(most)}", "guess" if guess else "none", len(own), *map(fmean, zip(*own, strict=True)))
        for (heat, by, most, guess), own in sorted(kinds.items())
    )
    return Table("Rounds, as expected and as they came", _EXPECTED, tuple(rows))


def _up_to(most: int) -> str:
    """More than half of it."""
    return str(most) if most < 3 else f"{most // 2 + 1} to {most}"


class ProfileFigures(msgspec.Struct, frozen=True, kw_only=True, rename={"requests": "accounts"}):
    """The figures of all requests. The field `requests` has the key "accounts" in JSON."""

    strategy: str
    machine: tuple[str, ...]
    prompt_tokens: int
    notes: tuple[str, ...]
    """Conditions that make figures invalid or incomplete."""
    requests: tuple[RequestProfile, ...]
    expected: Table
    """Of all requests of the last pipeline."""


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
    used = set().union(*(each.used for each in rounds(request.seen)))
    draft = draft_time(request, grown_by(run), used)
    target_busy = request.busy(work(request.target, TARGET_WORK), request.decode)
    draft_busy = request.busy(work(request.draft, DRAFT_WORK), request.decode)
    return RequestProfile(
        temperature=request.temperature,
        tokens_per_second=figures.tokens_per_second,
        tokens_per_round=figures.tokens_per_round,
        hit_rate=figures.hit_rate,
        acceptance_rate=figures.acceptance_rate,
        seconds=total(request.decode) / 1e9,
        draft_alone=_alone(run, request, replays, "draft"),
        target_alone=_alone(run, request, replays, "target"),
        overlapped_share=overlapped_share(draft_busy, target_busy),
        useful_overlap=draft["used"] / total(draft_busy) if draft_busy else None,
        target={use: time / 1e9 for use, time in target_time(request).items()},
        draft={use: time / 1e9 for use, time in draft.items()},
    )


def _alone(run: TracedRun, request: TracedRequest, replays: Mapping[str, WorkerLife], role: Role) -> float | None:
    """Seconds that a role's work in this request takes alone."""
    lives = [life for life in run.lives if life.worker.role == role and life.spans]
    kinds = TARGET_WORK if role == "target" else DRAFT_WORK
    times = [
        time_alone(life, replays[life.name], kinds, request.decode) if life.name in replays else None for life in lives
    ]
    known = [time for time in times if time is not None]
    return sum(known) / 1e9 if times and len(known) == len(times) else None
