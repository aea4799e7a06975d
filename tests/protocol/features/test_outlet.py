"""Laws of the features that readers on other machines get: their own columns, in order, few at a time."""

from collections.abc import Iterator

import numpy as np
import pytest

from protocol.features.blocks import halved, received
from protocol.features.outlet import FeatureOutlet
from protocol.features.ring import FeatureRing
from protocol.kv.arena_header import ElementType
from protocol.messages.base import RequestId
from protocol.messages.features import FeatureForm, Features, FeatureShipment
from protocol.messages.remote import MAX_PAYLOAD

pytestmark = pytest.mark.usefixtures("registry")
RECORDED = FeatureForm((-1, 1, 4), 1024)
READ = FeatureForm((1, 4), 1024)
ONE = RequestId(1)
A_BLOCK = MAX_PAYLOAD // (2 * 1024 * 2)
"""Tokens of the largest block."""


def rows(first: int, count: int) -> np.ndarray:
    """Each output of a token: its position + 1000 * (place of the output)."""
    row = np.repeat(np.arange(3) * 1000, 1024)
    return (np.arange(first, first + count)[:, None] % 500 + row).astype(np.float16)


@pytest.fixture
def ring() -> Iterator[FeatureRing]:
    ring = FeatureRing.create(RECORDED, ElementType.FLOAT16, fingerprint="a" * 64, epoch=1, capacity=1000)
    yield ring
    ring.unlink()
    ring.close()


@pytest.fixture
def outlet() -> Iterator[FeatureOutlet]:
    outlet = FeatureOutlet(READ)
    yield outlet
    outlet.close()


def announced(ring: FeatureRing, first: int, count: int, round: int = 0) -> Features:
    ring.write(first, rows(first, count))
    return Features(ONE, round, ring.name, first, count)


def spans(shipments: list[FeatureShipment]) -> list[tuple[int, int]]:
    return [(shipment.block.first, shipment.block.rows) for shipment in shipments]


def test_a_draft_gets_its_own_columns_of_what_is_announced(ring: FeatureRing, outlet: FeatureOutlet):
    outlet.announce(announced(ring, 7, 5, round=3))
    (shipment,) = outlet.due().blocks
    found = received(shipment.block, shipment.payload)

    assert (shipment.block.request, shipment.block.round, shipment.block.form) == (ONE, 3, READ)
    assert found is not None
    assert np.array_equal(found, rows(7, 5)[:, 1024:].astype(np.float32))


def test_a_draft_that_starts_late_gets_what_the_ring_held_before(ring: FeatureRing, outlet: FeatureOutlet):
    announced(ring, 0, 10)
    outlet.announce(announced(ring, 10, 2))
    sent = spans(outlet.due().blocks)

    assert sent == [(0, 12)]


def test_nothing_is_sent_twice(ring: FeatureRing, outlet: FeatureOutlet):
    message = announced(ring, 0, 10)
    outlet.announce(message)
    outlet.announce(message)
    sent = spans(outlet.due().blocks)
    outlet.announce(message)
    outlet.announce(announced(ring, 10, 2))
    sent += spans(outlet.due().blocks)

    assert sent == [(0, 10), (10, 2)]


def test_few_blocks_are_under_way_and_the_rest_follows_in_order(ring: FeatureRing, outlet: FeatureOutlet):
    outlet.announce(announced(ring, 0, 7 * A_BLOCK))
    due = outlet.due()
    first = spans(due.blocks)
    due.sent(len(first), 1.0)
    assert outlet.due().blocks == []
    assert not outlet.acknowledge(0.5)
    assert outlet.acknowledge(1.0)
    rest = spans(outlet.due().blocks)

    assert len(first) == 4
    assert first + rest == [(start, A_BLOCK) for start in range(0, 7 * A_BLOCK, A_BLOCK)]


def test_any_later_answer_acknowledges_what_was_sent_before(ring: FeatureRing, outlet: FeatureOutlet):
    """The answer of a Ping may be lost with its connection."""
    outlet.announce(announced(ring, 0, 7 * A_BLOCK))
    due = outlet.due()
    due.sent(len(due.blocks), 1.0)
    outlet.acknowledge(2.5)
    left = outlet.due().blocks

    assert left


def test_what_the_ring_lost_meanwhile_is_left_out(ring: FeatureRing, outlet: FeatureOutlet):
    outlet.announce(announced(ring, 0, 900))
    due = outlet.due()
    due.sent(len(due.blocks), 1.0)
    outlet.announce(announced(ring, 900, 900))
    outlet.acknowledge(1.0)
    (first, *_) = spans(outlet.due().blocks)

    assert first == (800, A_BLOCK)


def test_a_ring_that_is_gone_and_outputs_that_are_not_recorded_send_nothing(ring: FeatureRing):
    gone, other = FeatureOutlet(READ), FeatureOutlet(FeatureForm((2,), 1024))
    gone.announce(Features(ONE, 0, "lp-00000000000000000000", 0, 10))
    other.announce(announced(ring, 0, 10))
    sent = [*gone.due().blocks, *other.due().blocks]
    gone.close()
    other.close()

    assert sent == []


def test_an_ended_sequence_is_forgotten(ring: FeatureRing, outlet: FeatureOutlet):
    outlet.announce(announced(ring, 0, 10))
    outlet.forget(ONE)

    assert outlet.due().blocks == []


def test_full_precision_is_sent_in_half():
    numbers = np.array([[1.0, -3.3, 70_000.0, 1e-3], [np.inf, np.nan, -1e30, 0.0]], np.float32)
    element, rows = halved(numbers, ElementType.FLOAT32)

    assert element is ElementType.FLOAT16
    assert np.allclose(rows[0], [1.0, -3.3, 65504, 1e-3], rtol=1e-3)
    assert np.isinf(rows[1, 0])
    assert np.isnan(rows[1, 1])
    assert rows[1, 2:].tolist() == [-65504, 0]
