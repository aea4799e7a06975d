"""Laws of where features come from: a ring of the same run, or blocks without a gap."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from msgspec.structs import replace

from draft_worker import features
from draft_worker.features import FeatureFeed, ReceivedBlocks, attached_ring
from protocol.features.blocks import shipments
from protocol.features.ring import FeatureRing
from protocol.kv.arena_header import ElementType
from protocol.messages.base import RequestId
from protocol.messages.features import FeatureForm, Features, FeatureShipment
from protocol.speculation.rolling_context import RollingContext

FORM = FeatureForm((1, 4), 3)


def rows(first: int, count: int, width: int = 6) -> np.ndarray:
    return np.arange(first * width, (first + count) * width, dtype=np.float32).reshape(count, width)


def block(first: int, count: int, form: FeatureForm = FORM) -> FeatureShipment:
    (shipment,) = shipments(RequestId(1), 0, first, form, ElementType.FLOAT32, rows(first, count, form.elements))
    return shipment


def source(*blocks: FeatureShipment) -> ReceivedBlocks:
    received = ReceivedBlocks(FORM)
    for each in blocks:
        received.add(each)
    return received


@pytest.mark.usefixtures("registry")
def test_a_ring_of_another_run_is_not_read():
    ring = FeatureRing.create(FORM, ElementType.FLOAT32, fingerprint="a" * 64, epoch=7)
    ring.write(0, rows(0, 4))
    own, other, gone = attached_ring(ring.name, 7), attached_ring(ring.name, 8), attached_ring("lp-" + "0" * 20, 7)
    assert own is not None
    found = own.read(1, 3, (1, 4))
    own.close()
    ring.unlink()
    ring.close()

    assert found is not None
    assert np.array_equal(found, rows(1, 3))
    assert other is gone is None


def test_blocks_are_read_across_their_borders():
    received = source(block(5, 3), block(8, 4), block(12, 1))

    assert received.available == range(5, 13)
    for first in range(5, 13):
        for count in range(1, 14 - first):
            found = received.read(first, count, FORM.outputs)
            assert found is not None
            assert np.array_equal(found, rows(first, count))
    assert received.read(4, 2, FORM.outputs) is None
    assert received.read(12, 2, FORM.outputs) is None


def test_a_gap_leaves_what_is_behind_it():
    received = source(block(0, 3), block(5, 3))

    assert received.available == range(5, 8)
    assert received.read(0, 3, FORM.outputs) is None


@pytest.mark.parametrize(
    "stray",
    [
        block(3, 2),
        block(8, 2, FeatureForm((1, 5), 3)),
        FeatureShipment(block(8, 2).block, bytes(48)),
        FeatureShipment(block(8, 2).block, b""),
        FeatureShipment(replace(block(8, 2).block, rows=3), block(8, 2).payload),
    ],
    ids=["repeated", "another form", "damaged", "empty", "fewer bytes"],
)
def test_blocks_that_do_not_fit_are_dropped(stray: FeatureShipment):
    received = source(block(0, 8), stray)

    assert received.available == range(8)


def test_the_oldest_blocks_go_first(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(features, "_KEPT_BYTES", 10 * 24)
    received = source(*(block(first, 4) for first in range(0, 40, 4)))

    assert received.available == range(32, 40)
    assert len(received._blocks) == 2


class _Large:
    """A ring of two tokens whose states are larger than half precision."""

    form = FeatureForm((0,), 4)
    available = range(2)

    def read(self, first: int, count: int, outputs: Sequence[int]) -> np.ndarray:
        return np.full((count, 4), [3e38, -3e38, 1.0, 6.1e4], np.float32)

    def close(self) -> None:
        """Nothing is held."""


def fed(form: FeatureForm, ring: Any, tokens: int) -> list[np.ndarray]:
    """What an engine of this form is fed of the first tokens of a ring."""
    engine: Any = SimpleNamespace(committed=tokens, staleness=tokens, unread=False, feed=Mock())
    feed = FeatureFeed(form, RollingContext(100), lambda: 0.0, lambda _: ring)
    feed.announce(Features(RequestId(1), 0, "ring", 0, tokens))
    feed.feed(engine, tokens)
    feed.close()
    assert all(first == 0 for (first, _), _ in engine.feed.call_args_list)
    return [rows for (_, rows), _ in engine.feed.call_args_list]


def test_states_beyond_half_precision_are_cut_before_any_engine_reads_them():
    (found,) = fed(_Large.form, _Large(), 2)

    assert found.tolist() == [[6e4, -6e4, 1.0, 6e4]] * 2
