"""A profile's findings and files: tables, a Perfetto trace, the figures as JSON."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket, TrackEvent
from perfetto.trace_builder.proto_builder import TraceProtoBuilder

from orchestrator.lab.findings import Cell, Column, Field, Findings, Table, tabulated
from orchestrator.lab.profile.figures import ProfileFigures, RequestProfile
from orchestrator.lab.profile.measure import MeasuredRun
from orchestrator.lab.profile.overlap import WIDEST, work
from orchestrator.lab.profile.run import TracedRun, TracedSpan
from protocol.errors import InputError
from protocol.shown_names import device_name
from protocol.worker.spans import SpanKind

NAMES = ("trace.perfetto-trace", "profile.json")
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
_DRAFT_WORDS = {
    "used": "hidden and used",
    "discarded": "hidden but discarded",
    "exposed": "exposed",
    "prefill": "prefill",
    "idle": "idle",
}
"""What the draft's time is spent on."""
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
    tables += [_times("draft", profile.requests, lambda each: each.draft, _DRAFT_WORDS)] if drafted else []
    tables.append(profile.expected)
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
    trace, figures = paths = [folder / name for name in NAMES]
    trace.write_bytes(perfetto_trace(measured.run))
    figures.write_bytes(msgspec.json.format(msgspec.json.encode(measured.profile)))
    return paths


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
    for life in run.lives:
        trace.track(f"{life.worker.role} ({device_name(life.worker.device)})", life.spans)
    for kind, name in _OWN_TRACKS:
        trace.track(name, work(run.orchestrator, (kind,)))
    return trace.builder.serialize()


class _Trace:
    """The packets so far."""

    def __init__(self, run: TracedRun) -> None:
        self.builder = TraceProtoBuilder()
        spans = [*run.orchestrator, *(span for life in run.lives for span in life.spans)]
        self._zero = min((span.begin for span in spans), default=0)
        self._tracks = 0

    def track(self, name: str, spans: Iterable[TracedSpan]) -> None:
        self._tracks += 1
        descriptor = self._packet().track_descriptor
        descriptor.uuid = self._tracks
        descriptor.name = name
        for at, begins, span in _edges_in_order(spans):
            event = self._event(at)
            if begins:
                _describe(event, span)

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


def _describe(event: TrackEvent, span: TracedSpan) -> None:
    event.type = TrackEvent.TYPE_SLICE_BEGIN
    event.name = f"{span.kind.name.lower()} {span.tokens or ''}".strip()
    event.categories.append(span.kind.name.lower())
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
