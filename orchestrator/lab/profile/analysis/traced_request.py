"""One request of a traced run: its time, and the spans of target, draft and orchestrator in it. Pure.

Requests follow one another: every span between the start and the end of a request belongs to it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from orchestrator.lab.profile.analysis.intervals import Interval, Intervals, intersection, union
from orchestrator.lab.profile.run import TracedRun, TracedSpan
from orchestrator.runtime.recording import Seen
from protocol.messages.worker import Start, Verdict
from protocol.worker.spans import SpanKind


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """Times are nanoseconds on the orchestrator's clock."""

    sequence: int
    temperature: float
    began: int
    """The orchestrator sent the target's Start."""
    decoding: int
    """The target had prefilled the prompt; decoding begins."""
    ended: int
    """The target had its last verdict."""
    target: tuple[TracedSpan, ...]
    draft: tuple[TracedSpan, ...]
    waits: tuple[TracedSpan, ...]
    """The orchestrator let the free target wait for growth."""
    seen: tuple[Seen, ...]

    @property
    def all(self) -> Intervals:
        return [(self.began, self.ended)]

    @property
    def decode(self) -> Intervals:
        return [(self.decoding, self.ended)]

    def busy(self, spans: Iterable[TracedSpan], within: Intervals) -> Intervals:
        """The time covered by any of these spans."""
        return intersection(union(edges(span) for span in spans), within)


def traced_requests(run: TracedRun) -> list[TracedRequest]:
    """Every request with a verdict, in order."""
    starts = {}
    for seen in run.seen:
        if isinstance(seen.message, Start) and seen.role == "target":
            starts.setdefault(seen.message.sequence, seen)
    return [request for seen in starts.values() if (request := _traced_request(run, seen)) is not None]


def edges(span: TracedSpan) -> Interval:
    return (span.begin, span.end)


def _traced_request(run: TracedRun, start: Seen) -> TracedRequest | None:
    assert isinstance(start.message, Start)
    sequence = start.message.sequence
    seen = tuple(each for each in run.seen if each.message.sequence == sequence)
    target = run.of("target")
    rounds = [span for span in target if span.kind is SpanKind.VERIFY and span.sequence == sequence]
    if not rounds or not any(isinstance(each.message, Verdict) for each in seen):
        return None
    began, ended = start.at, max(span.end for span in rounds)
    prefilled = [span.end for span in target if span.kind is SpanKind.PREFILL and began <= span.end <= rounds[0].begin]
    return TracedRequest(
        sequence=sequence,
        temperature=start.message.sampling.temperature,
        began=began,
        decoding=max(prefilled, default=rounds[0].begin),
        ended=ended,
        target=_touching(target, began, ended),
        draft=_touching(run.of("draft"), began, ended),
        waits=_touching([span for span in run.orchestrator if span.kind is SpanKind.WAIT], began, ended),
        seen=seen,
    )


def _touching(spans: Iterable[TracedSpan], begin: int, end: int) -> tuple[TracedSpan, ...]:
    return tuple(span for span in spans if span.end > begin and span.begin < end)
