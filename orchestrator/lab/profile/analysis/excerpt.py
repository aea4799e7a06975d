"""A few rounds of a request, cut out for a picture: bars in lanes, and which growth each verdict used. Pure."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from orchestrator.lab.profile.analysis.figures import grown_by
from orchestrator.lab.profile.analysis.overlap import (
    TARGET_WORK,
    Interval,
    Intervals,
    Step,
    TracedRequest,
    VerificationRound,
    difference,
    edges,
    intersection,
    rounds,
    work,
)
from orchestrator.lab.profile.run import TracedRun
from protocol.worker.spans import SpanKind

BarKind: TypeAlias = Literal["verify", "tidy", "prefill", "used", "discarded", "exposed", "wait"]

ROUNDS = 8
"""Rounds in a picture."""


@dataclass(frozen=True, slots=True)
class TimelineBar:
    """Milliseconds from the beginning of the excerpt."""

    begin: float
    end: float
    look: BarKind


@dataclass(frozen=True, slots=True)
class Use:
    """A growth step whose tokens the target accepted: from its end to the end of the verification, milliseconds."""

    grown: float
    chosen: float


@dataclass(frozen=True, slots=True)
class Excerpt:
    """Lanes from top to bottom: draft, target; a wait of the orchestrator stands in the target's lane."""

    temperature: float
    length: float
    """Milliseconds."""
    first: int
    """Number of the first round."""
    count: int
    draft: tuple[TimelineBar, ...]
    target: tuple[TimelineBar, ...]
    uses: tuple[Use, ...]


def excerpt(run: TracedRun, request: TracedRequest, count: int = ROUNDS) -> Excerpt:
    """`count` rounds from the middle of the request, or all if there are fewer."""
    done = rounds(request.seen)
    middle = max(0, (len(done) - count) // 2)
    chosen = done[middle : middle + count]
    numbers = {each.round for each in chosen}
    verifies = [span for span in work(request.target, (SpanKind.VERIFY,)) if span.round in numbers]
    begin, end = min(span.begin for span in verifies), max(span.end for span in verifies)
    margin = (end - begin) // 100
    window = (begin - margin, end + margin)
    return Excerpt(
        temperature=request.temperature,
        length=(window[1] - window[0]) / 1e6,
        first=chosen[0].round,
        count=len(chosen),
        draft=tuple(_draft(run, request, done, window)),
        target=tuple(_target(request, window)),
        uses=tuple(_uses(run, request, done, window)),
    )


def _target(request: TracedRequest, window: Interval) -> Iterator[TimelineBar]:
    looks: dict[SpanKind, BarKind] = {SpanKind.VERIFY: "verify", SpanKind.TIDY: "tidy", SpanKind.PREFILL: "prefill"}
    for span in request.target:
        yield from _bars([edges(span)], window, looks[span.kind])
    for span in request.waits:
        yield from _bars([edges(span)], window, "wait")


def _draft(
    run: TracedRun, request: TracedRequest, done: Iterable[VerificationRound], window: Interval
) -> Iterator[TimelineBar]:
    """Growth in the parts that were hidden behind the target's work and those that were not."""
    names = grown_by(run)
    used = set().union(*(each.used for each in done))
    busy = request.busy(work(request.target, TARGET_WORK), [window])
    for span in request.draft:
        if span.kind is SpanKind.PREFILL:
            yield from _bars([edges(span)], window, "prefill")
        elif span.kind is SpanKind.GROW:
            chosen = names.get(edges(span)) in used
            yield from _bars(intersection([edges(span)], busy), window, "used" if chosen else "discarded")
            yield from _bars(difference([edges(span)], busy), window, "exposed")


def _uses(run: TracedRun, request: TracedRequest, done: Iterable[VerificationRound], window: Interval) -> Iterator[Use]:
    grown = {step: edge for edge, step in grown_by(run).items()}
    verdicts = {span.round: span.end for span in work(request.target, (SpanKind.VERIFY,))}
    for each in done:
        for step in sorted(each.accepted_from):
            yield from _use(grown, step, verdicts.get(each.round), window)


def _use(grown: dict[Step, Interval], step: Step, verdict: int | None, window: Interval) -> Iterator[Use]:
    if step not in grown or verdict is None:
        return
    end = grown[step][1]
    if window[0] <= end and verdict <= window[1]:
        yield Use((end - window[0]) / 1e6, (verdict - window[0]) / 1e6)


def _bars(moments: Intervals, window: Interval, look: BarKind) -> Iterator[TimelineBar]:
    for begin, end in intersection(moments, [window]):
        yield TimelineBar((begin - window[0]) / 1e6, (end - window[0]) / 1e6, look)
