"""One request of a traced run: its time, and what target, draft and orchestrator did in it. Pure.

Requests follow one another: what happens between the first and the last moment of one belongs to it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from orchestrator.runtime.tracing import Seen
from orchestrator.tools.profile.analysis.intervals import Interval, Intervals, intersection, union
from orchestrator.tools.profile.run import Run, Span
from protocol.messages.worker import Start, Verdict
from protocol.worker.spans import Kind


@dataclass(frozen=True, slots=True)
class Episode:
    """Times are nanoseconds on the orchestrator's clock."""

    sequence: int
    temperature: float
    began: int
    """The target was told to start."""
    decoding: int
    """The target held the prompt; what follows is decoding."""
    ended: int
    """The target had its last verdict."""
    target: tuple[Span, ...]
    draft: tuple[Span, ...]
    waits: tuple[Span, ...]
    """The orchestrator let the free target wait for growth."""
    seen: tuple[Seen, ...]

    @property
    def all(self) -> Intervals:
        return [(self.began, self.ended)]

    @property
    def decode(self) -> Intervals:
        return [(self.decoding, self.ended)]

    def busy(self, spans: Iterable[Span], within: Intervals) -> Intervals:
        """When any of these spans was going on."""
        return intersection(union(edges(span) for span in spans), within)


def episodes(run: Run) -> list[Episode]:
    """Every request that came to a verdict, in order."""
    starts = {}
    for seen in run.seen:
        if isinstance(seen.message, Start) and seen.role == "target":
            starts.setdefault(seen.message.sequence, seen)
    return [episode for seen in starts.values() if (episode := _episode(run, seen)) is not None]


def edges(span: Span) -> Interval:
    return (span.begin, span.end)


def _episode(run: Run, start: Seen) -> Episode | None:
    assert isinstance(start.message, Start)
    sequence = start.message.sequence
    seen = tuple(each for each in run.seen if each.message.sequence == sequence)
    target = run.of("target")
    rounds = [span for span in target if span.kind is Kind.VERIFY and span.sequence == sequence]
    if not rounds or not any(isinstance(each.message, Verdict) for each in seen):
        return None
    began, ended = start.at, max(span.end for span in rounds)
    prefilled = [span.end for span in target if span.kind is Kind.PREFILL and began <= span.end <= rounds[0].begin]
    return Episode(
        sequence=sequence,
        temperature=start.message.sampling.temperature,
        began=began,
        decoding=max(prefilled, default=rounds[0].begin),
        ended=ended,
        target=_touching(target, began, ended),
        draft=_touching(run.of("draft"), began, ended),
        waits=_touching([span for span in run.orchestrator if span.kind is Kind.WAIT], began, ended),
        seen=seen,
    )


def _touching(spans: Iterable[Span], begin: int, end: int) -> tuple[Span, ...]:
    return tuple(span for span in spans if span.end > begin and span.begin < end)
