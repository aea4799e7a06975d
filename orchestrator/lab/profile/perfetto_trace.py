"""A run as a trace for https://ui.perfetto.dev: a track for each device and role, arrows from growth to verdicts."""

from collections.abc import Iterable, Iterator

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket, TrackEvent
from perfetto.trace_builder.proto_builder import TraceProtoBuilder

from orchestrator.lab.profile.analysis.figures import grown_by
from orchestrator.lab.profile.analysis.overlap import Interval, edges, rounds, traced_requests, work
from orchestrator.lab.profile.run import TracedRun, TracedSpan
from protocol.shown_names import device_name
from protocol.worker.spans import SpanKind

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
