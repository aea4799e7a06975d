"""From a traced run to one request's rounds, and to how much of the work of draft and target overlaps. Pure."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import NamedTuple, TypeAlias

from orchestrator.lab.bench.figures import FEWEST_PROMPTS, bootstrap_interval
from orchestrator.lab.profile.run import TracedRun, TracedSpan, WorkerLife
from orchestrator.runtime.recording import Seen
from protocol.messages.base import NodeId
from protocol.messages.worker import Grow, Start, Verdict, Verify
from protocol.speculation.token_tree import node_id
from protocol.worker.spans import SpanKind

Interval: TypeAlias = tuple[int, int]
"""Begin and end, the end excluded."""
Intervals: TypeAlias = list[Interval]
"""Not empty, ascending, with gaps between them."""


def union(intervals: Iterable[Interval]) -> Intervals:
    """All moments that are in any of them. Takes what overlaps, touches, is nested, empty or out of order."""
    joined: Intervals = []
    for begin, end in sorted(intervals):
        if begin >= end:
            continue
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def intersection(one: Intervals, other: Intervals) -> Intervals:
    """Moments in both."""
    common: Intervals = []
    first = second = 0
    while first < len(one) and second < len(other):
        begin = max(one[first][0], other[second][0])
        end = min(one[first][1], other[second][1])
        if begin < end:
            common.append((begin, end))
        if one[first][1] < other[second][1]:
            first += 1
        else:
            second += 1
    return common


def difference(one: Intervals, other: Intervals) -> Intervals:
    """Moments in the first that are not in the second."""
    if not one:
        return []
    edges = [one[0][0], *(edge for interval in other for edge in interval), one[-1][1]]
    return intersection(one, [(begin, end) for begin, end in zip(edges[::2], edges[1::2], strict=True) if begin < end])


def total(intervals: Intervals) -> int:
    """How long all of them are together."""
    return sum(end - begin for begin, end in intervals)


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
            starts.setdefault(seen.message.request, seen)
    return [request for seen in starts.values() if (request := _traced_request(run, seen)) is not None]


def edges(span: TracedSpan) -> Interval:
    return (span.begin, span.end)


def _traced_request(run: TracedRun, start: Seen) -> TracedRequest | None:
    assert isinstance(start.message, Start)
    sequence = start.message.request
    seen = tuple(each for each in run.seen if each.message.request == sequence)
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


class TracedStep(NamedTuple):
    """One growth step."""

    incarnation: int
    serial: int


class VerificationRound(NamedTuple):
    """One verification with a verdict."""

    round: int
    accepted_from: set[TracedStep]
    """Steps that published a node whose token the target accepted."""
    used: set[TracedStep]
    """Those, and the steps without which they would have come too late: each published a token that a later
    one of them was computed behind, before the target had chosen it."""


def rounds(seen: Iterable[Seen]) -> list[VerificationRound]:
    """The rounds with a verdict, in order. `seen`: the messages of one request, in order."""
    growth = _Growth()
    asked: dict[int, tuple[Verify, dict[NodeId, TracedStep]]] = {}
    done: dict[int, VerificationRound] = {}
    for each in seen:
        match each.message:
            case Grow() as grow:
                growth.add(grow, TracedStep(each.incarnation, each.serial))
            case Verify(round=round) as verify if round not in asked:
                asked[round] = verify, growth.sources(verify)
            case Verdict(round=round) as verdict if round in asked and round not in done:
                done[round] = _round(*asked[round], verdict, growth)
    return list(done.values())


class _Growth:
    """The orchestrator's knowledge of the draft's growth steps, and the accepted path."""

    def __init__(self) -> None:
        self._published: set[NodeId] = set()
        self._evaluated: dict[NodeId, TracedStep] = {}
        """The step that evaluated a node, and so found its children."""
        self._chosen: dict[NodeId, _Chosen] = {}

    def add(self, grow: Grow, step: TracedStep) -> None:
        for parent, token in zip(grow.parents, grow.tokens, strict=True):
            self._published.add(node_id(parent, token))
            if grow.evaluated:
                self._evaluated.setdefault(parent, step)

    def step_of(self, parent: NodeId, child: NodeId) -> TracedStep | None:
        """The step that has published `child` by now."""
        return self._evaluated.get(parent) if child in self._published else None

    def sources(self, verify: Verify) -> dict[NodeId, TracedStep]:
        """The step that each node below the root came from; a node that no step grew is not there."""
        ids, found = [verify.root], {}
        for token, parent in zip(verify.tokens[1:], verify.parents[1:], strict=True):
            ids.append(node_id(ids[parent], token))
            if (step := self.step_of(ids[parent], ids[-1])) is not None:
                found[ids[-1]] = step
        return found

    def choose(self, path: Sequence[NodeId]) -> None:
        """The target chose this path behind its first node."""
        for parent, child in pairwise(path):
            ahead = child in self._evaluated
            self._chosen.setdefault(child, _Chosen(parent, self.step_of(parent, child), ahead))

    def steps_behind(self, node: NodeId) -> set[TracedStep]:
        """The step that published this chosen node, and those that made it possible ahead of the target."""
        steps: set[TracedStep] = set()
        known = self._chosen.get(node)
        while known is not None and known.step is not None:
            steps.add(known.step)
            above = self._chosen.get(known.parent)
            known = above if above is not None and above.ahead else None
        return steps


class _Chosen(NamedTuple):
    """A token of the output, as it was when the target chose it."""

    parent: NodeId
    step: TracedStep | None
    """The step that had published it, if one had."""
    ahead: bool
    """The draft had evaluated it already."""


def _round(verify: Verify, steps: Mapping[NodeId, TracedStep], verdict: Verdict, growth: _Growth) -> VerificationRound:
    """`steps`: those that the nodes under verification came from."""
    path = [verify.root, *verdict.path]
    growth.choose([*path, node_id(path[-1], verdict.bonus)])
    grown = [node for node in verdict.path if node in steps]
    used = set().union(*map(growth.steps_behind, grown))
    return VerificationRound(verify.round, {steps[node] for node in grown}, used)


TARGET_WORK = (SpanKind.VERIFY, SpanKind.TIDY)
DRAFT_WORK = (SpanKind.GROW, SpanKind.PREFILL)


WIDEST = 0.5
"""An efficiency with a wider interval is not known."""


class Repeat(NamedTuple):
    """Seconds of the same work."""

    draft: float
    """Alone."""
    target: float
    """Alone."""
    both: float
    """What it took together."""


def efficiency(repeats: Sequence[Repeat]) -> tuple[float, float, float] | None:
    """Share of the shorter one's work that was hidden behind the other's, in [0, 1]: the median of the repeats, and its
    95% interval. None if the repeats do not tell it: too few, without work, with an interval wider than WIDEST, or one
    above 1, where the longer work took longer alone than both together.

    The definition is that of the Intel MPI Benchmarks for computation and communication:
    clamp((T_draft + T_target - T_both) / min(T_draft, T_target), 0, 1).
    """
    if len(repeats) < FEWEST_PROMPTS or not all(min(draft, target) > 0 for draft, target, _ in repeats):
        return None
    shares = [(draft + target - both) / min(draft, target) for draft, target, both in repeats]
    low, high = bootstrap_interval(shares)
    bounds = [min(1.0, max(0.0, share)) for share in (median(shares), low, high)]
    return None if low > 1.0 or bounds[2] - bounds[1] > WIDEST else (bounds[0], bounds[1], bounds[2])


def overlapped_share(draft: Intervals, target: Intervals) -> float | None:
    """|draft busy and target busy| / |draft busy|; None for a draft that did nothing."""
    return total(intersection(draft, target)) / total(draft) if draft else None


def draft_time(request: TracedRequest, steps: Mapping[Interval, TracedStep], used: set[TracedStep]) -> dict[str, int]:
    """Nanoseconds of the draft while the request is decoded, by use; all together are that time.

    used, discarded: growth while the target was at work, in steps that led to accepted tokens (`used`) and in others;
    exposed: growth while it was not. `steps`: the step of each growth span.
    """
    target = request.busy(work(request.target, TARGET_WORK), request.decode)
    growth = work(request.draft, (SpanKind.GROW,))
    chosen = request.busy((span for span in growth if steps.get(edges(span)) in used), request.decode)
    grown = request.busy(growth, request.decode)
    busy = total(request.busy(work(request.draft, DRAFT_WORK), request.decode))
    used_time = total(intersection(chosen, target))
    return {
        "used": used_time,
        "discarded": total(intersection(grown, target)) - used_time,
        "exposed": total(difference(grown, target)),
        "prefill": busy - total(grown),
        "idle": total(request.decode) - busy,
    }


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
