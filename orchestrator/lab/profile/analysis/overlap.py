"""The overlap of the draft's and the target's work. Pure.

Work of the target: verification and the clean-up after it. Work of the draft: growth steps, and prefill while the
target decodes. Only the time of decoding counts.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from orchestrator.lab.profile.analysis.intervals import Interval, Intervals, difference, intersection, total
from orchestrator.lab.profile.analysis.rounds import Step
from orchestrator.lab.profile.analysis.traced_request import TracedRequest, edges
from orchestrator.lab.profile.run import TracedSpan, WorkerLife
from protocol.worker.spans import SpanKind

TARGET_WORK = (SpanKind.VERIFY, SpanKind.TIDY)
DRAFT_WORK = (SpanKind.GROW, SpanKind.PREFILL)


@dataclass(frozen=True, slots=True)
class DraftTime:
    """Nanoseconds of the draft while the request is decoded. The four kinds of work and `idle` are all of it."""

    used: int
    """Growth while the target was at work, in steps that published a token which the target then accepted, or
    one that led to it (`Round.used`)."""
    discarded: int
    """Growth while the target was at work, in all other steps."""
    exposed: int
    """Growth while the target was not at work."""
    prefill: int
    idle: int

    @property
    def busy(self) -> int:
        return self.used + self.discarded + self.exposed + self.prefill


def efficiency(draft: int, target: int, both: int) -> float | None:
    """Share of the shorter one's work that was hidden behind the other's, in [0, 1]; None without work.

    `draft` and `target`: what the work takes each alone; `both`: what it took together. The definition is
    that of the Intel MPI Benchmarks for computation and communication:
    clamp((T_draft + T_target - T_both) / min(T_draft, T_target), 0, 1).
    """
    shorter = min(draft, target)
    return min(1.0, max(0.0, (draft + target - both) / shorter)) if shorter > 0 else None


def overlapped_share(draft: Intervals, target: Intervals) -> float | None:
    """|draft busy and target busy| / |draft busy|; None for a draft that did nothing."""
    return total(intersection(draft, target)) / total(draft) if draft else None


def draft_time(request: TracedRequest, steps: dict[Interval, Step], used: set[Step]) -> DraftTime:
    """The draft's time by use. `steps`: the step of each growth span; `used`: the steps that led to accepted tokens."""
    target = request.busy(work(request.target, TARGET_WORK), request.decode)
    growth = work(request.draft, (SpanKind.GROW,))
    chosen = request.busy((span for span in growth if steps.get(edges(span)) in used), request.decode)
    grown = request.busy(growth, request.decode)
    busy = request.busy(work(request.draft, DRAFT_WORK), request.decode)
    hidden = intersection(grown, target)
    used_time = total(intersection(chosen, target))
    return DraftTime(
        used=used_time,
        discarded=total(hidden) - used_time,
        exposed=total(difference(grown, target)),
        prefill=total(busy) - total(grown),
        idle=total(request.decode) - total(busy),
    )


def work(spans: Iterable[TracedSpan], kinds: Sequence[SpanKind]) -> list[TracedSpan]:
    """The spans of these kinds."""
    return [span for span in spans if span.kind in kinds]


def time_alone(life: WorkerLife, replayed: WorkerLife, kinds: Sequence[SpanKind], within: Intervals) -> int | None:
    """Nanoseconds that the work of `kinds` within these moments took in the replay; None if it is not all there.

    A span that lies partly outside counts for the part inside.
    """
    again = {name: span.length for name, span in _named(replayed.spans)}
    alone = 0.0
    for name, span in _named(life.spans):
        inside = total(intersection([edges(span)], within)) if span.kind in kinds else 0
        if inside and name not in again and span.kind is not SpanKind.TIDY:
            return None
        if inside:
            alone += inside / span.length * again.get(name, span.length)
    return round(alone)


def _named(spans: Iterable[TracedSpan]) -> Iterator[tuple[tuple[int, ...], TracedSpan]]:
    """Spans with their identity in a replay: their fields, and their number among the spans with equal fields."""
    seen: Counter[tuple[int, ...]] = Counter()
    for span in spans:
        name = (span.kind, span.sequence, span.round, span.serial)
        seen[name] += 1
        yield (*name, seen[name]), span
