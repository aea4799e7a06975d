"""Spans, clocks and traced workers: kept spans, lost spans, and unchanged behaviour."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from protocol.messages.base import NodeId, RequestId
from protocol.messages.plans import BestFirst
from protocol.messages.sampling import Sampling
from protocol.messages.worker import FromWorker, Grow, Hello, Start, ToWorker, Verdict, Verify
from protocol.worker.spans import SpanKind, SpanRing, load_spans
from protocol.worker.tracing import TracedWorker, load_script, run_script, traced

START = Start(RequestId(1), 0, (1, 2), NodeId(9), Sampling(), BestFirst(1, 1))


class Ticking:
    """A clock that advances by one at each call."""

    def __init__(self) -> None:
        self.time = 0

    def __call__(self) -> int:
        self.time += 1
        return self.time


class Steps:
    """A draft that prefills once and then grows forever. Records its messages."""

    def __init__(self) -> None:
        self.asked: list[ToWorker | None] = []

    def hello(self) -> Hello:
        return Hello("draft", "", "", "", 1, 1, "", "", 0)

    def handle(self, message: ToWorker) -> Iterator[FromWorker]:
        self.asked.append(message)
        yield from ()

    @property
    def has_work(self) -> bool:
        return True

    def work(self) -> Iterator[FromWorker]:
        first = None not in self.asked
        self.asked.append(None)
        if not first:
            yield Grow(RequestId(1), 0, (NodeId(9),), (3,), (0.5,), 4, 0.0)


def ring_of(count: int, capacity: int) -> SpanRing:
    ring = SpanRing(capacity)
    for index in range(count):
        ring.add(SpanKind.GROW, index, index + 1, sequence=1, round=index, tokens=8, serial=index + 1)
    return ring


@pytest.mark.parametrize("count", [0, 1, 4, 5, 11])
def test_a_ring_keeps_the_newest_in_order_and_says_how_many_it_lost(count: int):
    ring = ring_of(count, capacity=4)

    assert ring.spans()["begin"].tolist() == list(range(max(0, count - 4), count))
    assert ring.lost == max(0, count - 4)


def test_spans_survive_a_file(tmp_path: Path):
    ring = ring_of(6, capacity=4)
    ring.save(tmp_path / "target-1.spans")

    spans, lost = load_spans(tmp_path / "target-1.spans")
    assert (spans.tolist(), lost) == (ring.spans().tolist(), 2)


def test_a_file_with_other_arrays_is_no_spans(tmp_path: Path):
    np.savez(tmp_path / "other.npz", spans=np.zeros(3), lost=np.int64(0))

    with pytest.raises(ValueError, match="no spans"):
        load_spans(tmp_path / "other.npz")


def test_traced_work_is_reported_by_kind_and_its_grow():
    ring = SpanRing(16, Ticking())
    worker = TracedWorker(Steps(), ring)
    run_script(worker, [START, None, None, None])

    assert [(SpanKind(span["kind"]), int(span["serial"])) for span in ring.spans()] == [
        (SpanKind.PREFILL, 0),
        (SpanKind.GROW, 1),
        (SpanKind.GROW, 2),
    ]
    assert (ring.spans()["end"] > ring.spans()["begin"]).all()


class BeginsEarly(Steps):
    """A target that begins a forward as a unit of work and answers its Verify later, `seconds` after that begin."""

    seconds = 0.0

    def handle(self, message: ToWorker) -> Iterator[FromWorker]:
        yield Verdict(RequestId(1), 0, (), 3, self.seconds)

    def work(self) -> Iterator[FromWorker]:
        yield from ()


@pytest.mark.parametrize(
    ("seconds", "spans"), [(1.0, [(SpanKind.VERIFY, 1)]), (0.0, [(SpanKind.TIDY, 1), (SpanKind.VERIFY, 3)])]
)
def test_a_forward_that_began_as_a_unit_of_work_is_one_span(seconds: float, spans: list[tuple[SpanKind, int]]):
    ring, target = SpanRing(16, Ticking()), BeginsEarly()
    target.seconds = seconds
    run_script(TracedWorker(target, ring), [None, Verify(RequestId(1), 0, NodeId(9), 0, (1,), (-1,))])

    assert [(SpanKind(span["kind"]), int(span["begin"])) for span in ring.spans()][: len(spans)] == spans


def test_a_script_replays_the_same_messages(tmp_path: Path):
    first, again = Steps(), Steps()
    with traced(first, str(tmp_path), "draft-2") as worker:
        run_script(worker, [START, None, START, None, None])

    run_script(again, load_script(tmp_path / "draft-2.script"))
    assert again.asked == first.asked == [START, None, START, None, None]


def test_no_worker_is_traced_without_a_folder():
    worker = Steps()

    with traced(worker, "", "draft-2") as same:
        assert same is worker
