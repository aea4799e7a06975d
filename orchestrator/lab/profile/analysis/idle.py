"""The target's time by kind of work, and its idle time by cause. Pure.

The cause of idle time is the place of the request: a message under way (in either direction), the orchestrator between
the receipt of an answer and the next verification, or the draft whose growth the orchestrator awaits.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from orchestrator.lab.profile.analysis.intervals import Intervals, difference, intersection, total, union
from orchestrator.lab.profile.analysis.overlap import work
from orchestrator.lab.profile.analysis.traced_request import TracedRequest, edges
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
