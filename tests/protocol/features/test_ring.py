"""Laws of the feature ring: a row that is read is the row that was written for this token, or none is read."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing
from copy import deepcopy
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from msgspec.structs import replace

from protocol.features.ring import (
    HEADER_BYTES,
    LEAST_ROWS,
    FeatureRing,
    RingError,
    RingHeader,
    RingLayout,
    decode_header,
    encode_header,
)
from protocol.kv.arena import Arena
from protocol.kv.arena_header import ArenaLayout, ElementType, sealed
from protocol.kv.segments import SegmentError, create_segment, sweep
from protocol.messages.features import FINAL, FeatureForm
from tests.support.segments import child

FORM = FeatureForm((FINAL, 1, 3), width=4)
MODEL = "a" * 64

pytestmark = pytest.mark.usefixtures("registry")


HONEST = {
    "layout": {"form": {"outputs": [-1, 1, 3], "width": 4}, "element": 1, "capacity": 8},
    **{"epoch": 7, "model": bytes(32), "begin": 0, "committed": 0},
}
SIZE = RingLayout(FORM, ElementType.FLOAT16, 8).segment_bytes


def hostile(part: str = "", **changes: Any) -> bytes:
    """A header with a right checksum and numbers of an attacker's choice."""
    header: Any = deepcopy(HONEST)
    place = {"": header, "layout": header["layout"], "form": header["layout"]["form"]}[part]
    place.update(changes)
    return sealed(b"LPFEATUR", header)


def create(capacity: int = 8, element: ElementType = ElementType.FLOAT16, form: FeatureForm = FORM) -> FeatureRing:
    return FeatureRing.create(form, element, fingerprint=MODEL, epoch=7, capacity=capacity)


def rows(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, 12)).astype(np.float16)


def row(position: int) -> np.ndarray:
    """The row that the token at this position has in all tests of what is available."""
    return np.full(12, position, np.float16)


def filled(count: int, capacity: int = 8) -> FeatureRing:
    ring = create(capacity)
    ring.write(0, rows(count))
    return ring


def test_rows_that_are_read_are_those_that_were_written():
    reader = FeatureRing.attach(filled(5).name)

    np.testing.assert_array_equal(reader.read(0, 5, FORM.outputs), rows(5).astype(np.float32))
    assert (reader.form, reader.epoch, reader.available) == (FORM, 7, range(5))


def test_a_reader_chooses_its_outputs():
    ring = filled(5)

    np.testing.assert_array_equal(ring.read(1, 2, (3, FINAL)), rows(5)[1:3, [8, 9, 10, 11, 0, 1, 2, 3]])
    assert ring.read(1, 2, (2, 3)) is None


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_not_read(bad: float):
    ring, written = create(), rows(3)
    written[1, 5] = bad
    ring.write(0, written)

    assert ring.read(0, 3, FORM.outputs) is None
    assert ring.read(2, 1, FORM.outputs) is not None
    assert ring.read(0, 3, (3,)) is not None


class RowsOfATarget(RuleBasedStateMachine):
    """A target writes, leaves out tokens, and overruns the ring."""

    def __init__(self) -> None:
        super().__init__()
        self.ring = create(capacity=5)
        self.written: set[int] = set()
        self.position = 0

    @rule(skipped=st.integers(0, 3), count=st.integers(0, 12))
    def write(self, skipped: int, count: int) -> None:
        if skipped:
            self.written.clear()
        self.position += skipped
        self.ring.write(
            self.position,
            np.array([row(self.position + index) for index in range(count)]).reshape(-1, 12).astype(np.float16),
        )
        self.written |= set(range(self.position, self.position + count))
        self.position += count

    @invariant()
    def a_span_is_read_if_all_its_rows_are_there(self) -> None:
        latest = {position for position in self.written if position >= self.position - 5}
        for first in range(max(0, self.position - 8), self.position + 2):
            for count in (1, 3):
                span = range(first, first + count)
                found = self.ring.read(first, count, FORM.outputs)
                if set(span) <= latest:
                    np.testing.assert_array_equal(found, [row(position) for position in span])
                else:
                    assert found is None

    def teardown(self) -> None:
        self.ring.close()
        self.ring.unlink()


def test_holes_and_overruns_make_rows_unavailable_never_wrong():
    run_state_machine_as_test(RowsOfATarget, settings=settings(max_examples=30, stateful_step_count=12))


@given(place=st.integers(0, 8 * 8 + 8 * 24 - 1), bit=st.integers(0, 7))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
def test_a_flipped_bit_makes_one_row_unavailable(place: int, bit: int):
    ring = filled(8)
    with closing(ring):
        ring._memory[HEADER_BYTES + place] ^= 1 << bit
        found = [ring.read(position, 1, FORM.outputs) for position in range(8)]
        damaged = place // 8 if place < 64 else (place - 64) // 24

        assert [position for position, each in enumerate(found) if each is None] == [damaged]
    ring.unlink()


@given(place=st.integers(0, len(hostile()) - 1), bit=st.integers(0, 7))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
def test_a_flipped_bit_of_the_header_makes_all_rows_unavailable(place: int, bit: int):
    ring = filled(8)
    with closing(ring):
        ring._memory[place] ^= 1 << bit

        assert ring.read(0, 1, FORM.outputs) is None
        assert not ring.available
        with pytest.raises(RingError):
            FeatureRing.attach(ring.name)
    ring.unlink()


def test_a_row_of_another_token_in_the_same_place_is_not_read():
    """A reader that holds an old header, while the new one is not written yet."""
    ring = filled(8)
    old = encode_header(ring._header)
    ring.write(8, rows(1, seed=9))
    ring._memory[: len(old)] = old

    assert ring.read(0, 1, FORM.outputs) is None


def test_rows_are_announced_to_be_gone_before_they_are_overwritten(monkeypatch: pytest.MonkeyPatch):
    """A reader that meets a half-written row must not take it for a damaged one."""
    writer = filled(8)
    reader = FeatureRing.attach(writer.name)
    seen: list[range] = []
    monkeypatch.setattr("protocol.features.ring._checksum", lambda *_: seen.append(reader.available) or 0)
    writer.write(8, rows(3))

    assert seen == [range(3, 8)] * 3
    assert reader.available == range(3, 11)


@pytest.mark.parametrize(
    "other",
    [
        {"epoch": 8},
        {"model": bytes(32)},
        {"layout": RingLayout(FORM, ElementType.FLOAT16, 7)},
        {"layout": RingLayout(FORM, ElementType.BFLOAT16, 8)},
        {"layout": RingLayout(FeatureForm((0, 1, 3), 4), ElementType.FLOAT16, 8)},
    ],
)
def test_a_ring_that_becomes_another_one_is_not_read(other: dict[str, object]):
    ring = filled(8)
    encoded = encode_header(replace(ring._header, **other))

    ring._memory[: len(encoded)] = encoded

    assert ring.read(0, 1, FORM.outputs) is None


@pytest.mark.parametrize(
    ("form", "element", "capacity"),
    [
        (FeatureForm((1, 3, 4), 4096), ElementType.BFLOAT16, 2730),
        (FeatureForm((0,), 256), ElementType.FLOAT32, 4096),
        (FeatureForm(tuple(range(12)), 8192), ElementType.FLOAT32, LEAST_ROWS),
    ],
)
def test_a_ring_holds_what_64_mib_hold(form: FeatureForm, element: ElementType, capacity: int):
    ring = create(4096, element, form)

    assert ring.layout.capacity == capacity
    assert capacity == LEAST_ROWS or ring.layout.capacity * ring.layout.row_bytes <= 64 << 20


# Segments that are no ring -----------------------------------------------------------------------


def test_the_hostile_header_is_otherwise_right():
    assert decode_header(hostile(), SIZE) == RingHeader(RingLayout(FORM, ElementType.FLOAT16, 8), 7, bytes(32))


@pytest.mark.parametrize(
    ("part", "name", "values"),
    [
        ("layout", "element", [9, 3]),
        ("layout", "capacity", [0, 9, (1 << 64) - 1]),
        ("form", "width", [0, 5, 0xFFFFFFFF]),
        ("form", "outputs", [[], [-1, 1, 3, 4], [*range(33)], [1, 1, 3], [-2, 1, 3], [1 << 30, 1, 3]]),
        ("", "begin", [1, -1]),
        ("", "committed", [(1 << 20) + 1, -1, (1 << 64) - 1]),
    ],
)
def test_a_header_that_promises_more_than_there_is_is_refused(part: str, name: str, values: list[Any]):
    for value in values:
        with pytest.raises(RingError):
            decode_header(hostile(part, **{name: value}), SIZE)


@given(st.binary(max_size=300))
def test_what_is_no_header_is_refused(page: bytes):
    with pytest.raises(RingError):
        decode_header(page, 1 << 30)


def test_a_truncated_segment_is_refused():
    name, memory = create_segment(4096)
    honest = encode_header(filled(5, capacity=400)._header)
    memory[: len(honest)] = honest

    with pytest.raises(RingError, match="more than its segment holds"):
        FeatureRing.attach(name)


def test_a_kv_arena_is_no_ring():
    arena = Arena.create(ArenaLayout(1, 1, 8, 8, ElementType.FLOAT16), fingerprint=MODEL, epoch=7)

    with pytest.raises(RingError, match="no feature ring"):
        FeatureRing.attach(arena.name)


def test_another_users_segment_is_refused(monkeypatch: pytest.MonkeyPatch):
    ring = filled(5)
    monkeypatch.setattr(os, "getuid", lambda: 12345)

    with pytest.raises(SegmentError, match="another user"):
        FeatureRing.attach(ring.name)


# Lifetime ----------------------------------------------------------------------------------------


@pytest.fixture
def writer() -> Iterator[subprocess.Popen[str]]:
    """A process that prints the name of its ring, fills and overruns it without end."""
    script = (
        "ring = create(capacity=64)\nprint(ring.name, flush=True)\n"
        "position = 0\nwhile True:\n    ring.write(position % 1000000, row(position % 1000)[None])\n    position += 1"
    )
    process = child(__name__, script)
    yield process
    process.kill()
    process.communicate()


def test_a_reader_beside_a_writer_reads_right_rows_only_and_a_killed_writer_leaks_nothing(
    writer: subprocess.Popen[str],
):
    assert writer.stdout is not None
    name = writer.stdout.readline().strip()
    ring = FeatureRing.attach(name)
    read = 0
    while read < 200:
        latest = ring.available
        for first in (latest.start, (latest.start + latest.stop) // 2, latest.stop - 4):
            found = ring.read(max(0, first), 4, FORM.outputs)
            if found is not None:
                expected = [row(position % 1000) for position in range(max(0, first), max(0, first) + 4)]
                np.testing.assert_array_equal(found, expected)
                read += 1
    writer.send_signal(signal.SIGKILL)
    writer.wait()

    assert sweep() == [name]
    with pytest.raises(SegmentError):
        FeatureRing.attach(name)
