"""A profile's findings and files: tables, a timeline, a Perfetto trace, the figures as JSON."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import matplotlib
import msgspec
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket, TrackEvent
from perfetto.trace_builder.proto_builder import TraceProtoBuilder

from orchestrator.lab.findings import Cell, Column, Field, Findings, Table, tabulated
from orchestrator.lab.profile.analysis.figures import ProfileFigures, RequestProfile, grown_by
from orchestrator.lab.profile.analysis.overlap import (
    TARGET_WORK,
    WIDEST,
    Interval,
    Intervals,
    TracedRequest,
    TracedStep,
    VerificationRound,
    difference,
    edges,
    intersection,
    rounds,
    traced_requests,
    work,
)
from orchestrator.lab.profile.measure import MeasuredRun
from orchestrator.lab.profile.run import TracedRun, TracedSpan
from protocol.errors import InputError
from protocol.shown_names import device_name
from protocol.worker.spans import SpanKind

NAMES = ("timeline.png", "trace.perfetto-trace", "profile.json")
_TARGET_WORDS = {
    "verify": "verifies",
    "tidy": "tidies up",
    "prefill": "prefills",
    "for_draft": "awaits growth",
    "for_prefill": "awaits the draft's prefill",
    "for_messages": "awaits messages",
    "for_orchestrator": "awaits the orchestrator",
}
"""What the target's time is spent on."""
_EFFICIENCY = (
    "(draft alone + target alone - both) / the shorter of the two, within 0 and 1: the share of the shorter one's work "
    "that the other hides (Intel MPI Benchmarks' definition), with its 95% interval over all repeats. Not known: the "
    f"interval is wider than {WIDEST:.0%}, or the longer work took longer alone than both. Alone: the same forwards "
    "replayed in the same process, without the other worker. T_both, T_draft, T_target: medians of those times in ms"
)
_EXPOSED = "exposed: the draft was at work and the target was not."
_FIELDS: tuple[Field[RequestProfile], ...] = (
    Field("T", lambda each: each.temperature, "g"),
    Field("tok/s", lambda each: each.tokens_per_second, ".1f"),
    Field("tok/round", lambda each: each.tokens_per_round, ".2f"),
    Field("hits", lambda each: each.hit_rate, ".0%"),
    Field("accepted", lambda each: each.acceptance_rate, ".0%"),
    Field(
        "overlapped",
        lambda each: each.overlapped_share,
        ".0%",
        "share of the draft's busy time in which the target was busy too",
    ),
    Field(
        "useful",
        lambda each: each.useful_overlap,
        ".0%",
        "share of the draft's busy time in which the target was busy too, in growth steps that published a token which "
        "the target then accepted, or one that led to it ahead of the target",
    ),
    Field("efficiency", lambda each: _efficiency(each), ".0%", _EFFICIENCY),
    Field("T_both", lambda each: each.seconds, ".0f", scale=1e3),
    Field("T_draft", lambda each: each.draft_alone, ".0f", scale=1e3),
    Field("T_target", lambda each: each.target_alone, ".0f", scale=1e3),
)


def findings(profile: ProfileFigures) -> Findings:
    """The figures, and the use of time by worker."""
    drafted = any(each.draft_alone or each.overlapped_share is not None for each in profile.requests)
    tables = [tabulated("", _FIELDS, profile.requests)]
    tables.append(_times("target", profile.requests, lambda each: each.target, _TARGET_WORDS))
    tables += [_times("draft", profile.requests, lambda each: each.draft, DRAFT_WORDS)] if drafted else []
    return Findings(
        title=f"Where the time of {profile.strategy} went",
        conditions=tuple(_conditions(profile)),
        tables=tuple(tables),
        notes=(*profile.notes, _EXPOSED),
        figures=msgspec.to_builtins(profile),
    )


def _efficiency(request: RequestProfile) -> Cell:
    if request.overlap_efficiency is None or request.overlap_efficiency_interval is None:
        return "not known" if request.undecided else None
    return (request.overlap_efficiency, *request.overlap_efficiency_interval)


def _conditions(profile: ProfileFigures) -> Iterator[str]:
    asked = f"prompt of {profile.prompt_tokens} tokens, {profile.requests[0].repeats} times"
    yield f"{profile.strategy}, {asked}. {'; '.join(profile.machine)}."
    if profile.clock_error is not None:
        yield f"Clocks of the processes agree to ±{profile.clock_error * 1e6:.0f} µs."


def _times(
    role: str,
    requests: Sequence[RequestProfile],
    time: Callable[[RequestProfile], Mapping[str, float]],
    words: Mapping[str, str],
) -> Table:
    """Two columns a temperature: milliseconds, and the share of the whole."""
    columns = [Column(f"{role}, ms")]
    for each in requests:
        columns += [Column(f"T = {each.temperature:g}", ".1f"), Column("", ".0%")]
    rows: list[tuple[Cell, ...]] = []
    for name, word in words.items():
        row: list[Cell] = [word]
        for each in requests:
            whole = sum(time(each).values())
            row += [1e3 * time(each)[name], time(each)[name] / whole if whole else None]
        rows.append(tuple(row))
    return Table("", tuple(columns), tuple(rows))


def require_folder(folder: Path) -> None:
    """Make the folder. Raises InputError if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder} can't be made ({error.strerror}): choose another folder for --out.") from error


def write_files(measured: MeasuredRun, folder: Path) -> list[Path]:
    """Write all files of `NAMES`; returns their paths."""
    profile, run = measured.profile, measured.run
    shown = [excerpt(run, request) for request in traced_requests(run)[-len(profile.requests) :]]
    picture, trace, figures = (folder / name for name in NAMES)
    write_timeline(profile, shown, picture)
    trace.write_bytes(perfetto_trace(run))
    figures.write_bytes(msgspec.json.format(msgspec.json.encode(profile)))
    return [picture, trace, figures]


# A trace for Perfetto -----------------------------------------------------------------------------

_OWN_TRACKS = (
    (SpanKind.STEP, "orchestrator"),
    (SpanKind.MESSAGE, "orchestrator: messages"),
    (SpanKind.WAIT, "awaits growth"),
)
_SEQUENCE = 1
"""All packets come from one writer."""


def perfetto_trace(run: TracedRun) -> bytes:
    """The file's content. Nanoseconds from the first span on."""
    trace = _Trace(run)
    flows = _flows(run)
    for life in run.lives:
        trace.track(f"{life.worker.role} ({device_name(life.worker.device)})", life.spans, flows)
    for kind, name in _OWN_TRACKS:
        trace.track(name, work(run.orchestrator, (kind,)), flows)
    return trace.builder.serialize()


class _Flows:
    """Numbers of the arrows that leave or reach a span, by the span's edges."""

    def __init__(self) -> None:
        self.leaving: dict[Interval, list[int]] = {}
        self.reaching: dict[Interval, list[int]] = {}
        self._count = 0

    def add(self, begin: Interval, end: Interval) -> None:
        self._count += 1
        self.leaving.setdefault(begin, []).append(self._count)
        self.reaching.setdefault(end, []).append(self._count)


def _flows(run: TracedRun) -> _Flows:
    """From each growth step to the verifications whose verdict accepted a token of it."""
    flows = _Flows()
    grown = {step: edge for edge, step in grown_by(run).items()}
    for request in traced_requests(run):
        verified = {span.round: edges(span) for span in work(request.target, (SpanKind.VERIFY,))}
        for each in rounds(request.seen):
            for step in sorted(each.accepted_from):
                if step in grown and each.round in verified:
                    flows.add(grown[step], verified[each.round])
    return flows


class _Trace:
    """The packets so far."""

    def __init__(self, run: TracedRun) -> None:
        self.builder = TraceProtoBuilder()
        spans = [*run.orchestrator, *(span for life in run.lives for span in life.spans)]
        self._zero = min((span.begin for span in spans), default=0)
        self._tracks = 0

    def track(self, name: str, spans: Iterable[TracedSpan], flows: _Flows) -> None:
        self._tracks += 1
        descriptor = self._packet().track_descriptor
        descriptor.uuid = self._tracks
        descriptor.name = name
        for at, begins, span in _edges_in_order(spans):
            event = self._event(at)
            if begins:
                _describe(event, span, flows)

    def _event(self, at: int) -> TrackEvent:
        packet = self._packet()
        packet.timestamp = at - self._zero
        packet.track_event.track_uuid = self._tracks
        packet.track_event.type = TrackEvent.TYPE_SLICE_END
        return packet.track_event

    def _packet(self) -> TracePacket:
        packet = self.builder.add_packet()
        packet.trusted_packet_sequence_id = _SEQUENCE
        return packet


def _describe(event: TrackEvent, span: TracedSpan, flows: _Flows) -> None:
    event.type = TrackEvent.TYPE_SLICE_BEGIN
    event.name = f"{span.kind.name.lower()} {span.tokens or ''}".strip()
    event.categories.append(span.kind.name.lower())
    event.flow_ids.extend(flows.leaving.get(edges(span), ()))
    event.terminating_flow_ids.extend(flows.reaching.get(edges(span), ()))
    for name, value in (("sequence", span.sequence), ("round", span.round), ("tokens", span.tokens)):
        annotation = event.debug_annotations.add()
        annotation.name = name
        annotation.int_value = value


def _edges_in_order(spans: Iterable[TracedSpan]) -> Iterator[tuple[int, bool, TracedSpan]]:
    """Moments of a track in the order of its file: an outer span begins before what it holds and ends behind it."""
    moments = []
    for span in spans:
        moments.append(((span.begin, 1, -span.end), True, span))
        moments.append(((span.end, 2 if span.length == 0 else 0, -span.begin), False, span))
    for (at, _, _), begins, span in sorted(moments, key=lambda moment: moment[0]):
        yield at, begins, span


# The rounds that are drawn ------------------------------------------------------------------------

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


def _use(grown: dict[TracedStep, Interval], step: TracedStep, verdict: int | None, window: Interval) -> Iterator[Use]:
    if step not in grown or verdict is None:
        return
    end = grown[step][1]
    if window[0] <= end and verdict <= window[1]:
        yield Use((end - window[0]) / 1e6, (verdict - window[0]) / 1e6)


def _bars(moments: Intervals, window: Interval, look: BarKind) -> Iterator[TimelineBar]:
    for begin, end in intersection(moments, [window]):
        yield TimelineBar((begin - window[0]) / 1e6, (end - window[0]) / 1e6, look)


# A picture of these rounds -------------------------------------------------------------------------

DRAFT_WORDS = {
    "used": "hidden and used",
    "discarded": "hidden but discarded",
    "exposed": "exposed",
    "prefill": "prefill",
    "idle": "idle",
}
"""What the draft's time is spent on."""
_COLOURS = {
    "verify": "#2f6fb5",
    "tidy": "#8fb8e0",
    "prefill": "#a88bc9",
    "used": "#1a9070",
    "discarded": "#e2a33d",
    "exposed": "#cf5a35",
    "wait": "#c9ced6",
}
_LEGEND = {
    "verify": "target verifies",
    "wait": "awaits growth",
    "used": "growth, used",
    "discarded": "growth, discarded",
    "exposed": "growth, target idle",
    "prefill": "prefill",
}
_DRAFT, _TARGET = 1.0, 0.0
_HEIGHT = 0.62


def write_timeline(profile: ProfileFigures, excerpts: Sequence[Excerpt], path: Path) -> None:
    """The overlap in some rounds of each temperature. `excerpts`: one a temperature."""
    with matplotlib.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(13, 2.1 * len(excerpts) + 0.6), layout="constrained")
        rows = figure.subplots(len(excerpts), squeeze=False)[:, 0]
        _legend(rows[0])
        for axes, excerpt, request in zip(rows, excerpts, profile.requests, strict=True):
            _rounds(axes, excerpt, request)
        figure.suptitle(_title(profile), x=0.01, ha="left", fontsize=13, fontweight="bold")
        figure.savefig(path, dpi=130)


def _title(profile: ProfileFigures) -> str:
    speeds = (
        f"{request.tokens_per_second:.1f} tokens/s at T = {request.temperature:g}" for request in profile.requests
    )
    return "\n".join([f"{profile.strategy}: {', '.join(speeds)}", *profile.machine[:1]])


def _legend(axes: Axes) -> None:
    handles = [Patch(color=_COLOURS[look], label=word) for look, word in _LEGEND.items()]
    place = {"loc": "lower right", "bbox_to_anchor": (1.0, 0.96), "ncols": len(handles)}
    axes.legend(handles=handles, frameon=False, fontsize=9, handlelength=1.0, borderaxespad=0.2, **place)


def _rounds(axes: Axes, excerpt: Excerpt, request: RequestProfile) -> None:
    for lane, bars in ((_DRAFT, excerpt.draft), (_TARGET, excerpt.target)):
        for bar in bars:
            _bar(axes, bar, lane)
    for use in excerpt.uses:
        axes.annotate(
            "",
            (use.chosen, _TARGET + _HEIGHT / 2),
            (use.grown, _DRAFT - _HEIGHT / 2),
            arrowprops={"arrowstyle": "-|>", "color": _COLOURS["used"], "lw": 0.9, "alpha": 0.7, "mutation_scale": 7},
        )
    axes.set(xlim=(0, excerpt.length), ylim=(-0.45, 1.45), yticks=(_TARGET, _DRAFT), yticklabels=("target", "draft"))
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("ms", loc="right", labelpad=-2)
    hidden = (
        "" if request.overlapped_share is None else f"; {request.overlapped_share:.0%} of the draft's time overlaps"
    )
    last = excerpt.first + excerpt.count - 1
    axes.set_title(f"T = {excerpt.temperature:g}, rounds {excerpt.first} to {last}{hidden}", loc="left", fontsize=10)


def _bar(axes: Axes, bar: TimelineBar, lane: float) -> None:
    axes.barh(lane, bar.end - bar.begin, _HEIGHT, bar.begin, color=_COLOURS[bar.look], edgecolor="white", linewidth=0.4)
