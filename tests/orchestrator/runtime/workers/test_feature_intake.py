"""Laws of the features that a target on another machine sends: what was asked for, in order, and nothing else."""

from collections.abc import Iterator

import numpy as np
import pytest
from msgspec.structs import replace

from orchestrator.runtime.workers.intake import FeatureIntake
from protocol.features.blocks import shipments
from protocol.features.ring import FeatureRing
from protocol.kv.arena_header import ElementType
from protocol.messages.base import MAX_CONTEXT, RequestId
from protocol.messages.features import FeatureForm, Features, FeatureShipment, Tap, Taps
from tests.support.segments import exists

pytestmark = pytest.mark.usefixtures("registry")
TAPS = Taps(12, 8)
RAW = FeatureForm((1, 4), 8)
ONE, TWO = RequestId(1), RequestId(2)


@pytest.fixture
def intake() -> Iterator[FeatureIntake]:
    """Of a target that serves one sequence."""
    intake = FeatureIntake(TAPS, epoch=7, fingerprint="a" * 64)
    intake.tap(Tap((1, 4)))
    intake.begin(ONE)
    yield intake
    intake.close()


def rows(first: int, count: int, form: FeatureForm = RAW) -> np.ndarray:
    return np.repeat(np.arange(first, first + count)[:, None] % 1000, form.elements, axis=1).astype(np.float16)


def block(first: int, count: int, form: FeatureForm = RAW, sequence: RequestId = ONE) -> FeatureShipment:
    (shipment,) = shipments(sequence, 3, first, form, ElementType.FLOAT16, rows(first, count, form))
    return shipment


def read(features: Features) -> np.ndarray:
    """What a draft finds where the message says."""
    ring = FeatureRing.attach(features.name)
    found = ring.read(features.first, features.rows, (1, 4))
    ring.close()
    assert found is not None
    return found


def test_a_draft_finds_the_rows_in_a_ring_of_this_machine(intake: FeatureIntake):
    for first, count in ((0, 5), (5, 3), (20, 2)):
        features = intake.add(*block(first, count))
        assert features is not None
        assert (features.request, features.round, features.first, features.rows) == (ONE, 3, first, count)
        assert np.array_equal(read(features), rows(first, count).astype(np.float32))


def test_lost_blocks_leave_a_gap_and_late_ones_are_dropped(intake: FeatureIntake):
    intake.add(*block(0, 4))
    behind = intake.add(*block(8, 4))
    late = intake.add(*block(4, 4))
    repeated = intake.add(*block(8, 4))
    goes_on = intake.add(*block(12, 1))
    assert behind is not None
    assert goes_on is not None
    ring = FeatureRing.attach(goes_on.name)
    there = ring.available
    ring.close()

    assert late is repeated is None
    assert there == range(8, 13)
    assert intake.dropped == 2


def honest() -> FeatureShipment:
    return block(0, 4)


HOSTILE: dict[str, FeatureShipment] = {
    "another sequence": block(0, 4, sequence=TWO),
    "other outputs": block(0, 4, FeatureForm((1, 5), 8)),
    "fewer outputs": block(0, 4, FeatureForm((1,), 8)),
    "another width": block(0, 4, FeatureForm((1, 4), 16)),
    "no element type": FeatureShipment(replace(honest().block, element=3), honest().payload),
    "fewer bytes": FeatureShipment(honest().block, honest().payload[:-2]),
    "no bytes": FeatureShipment(honest().block, b""),
    "more rows than bytes": FeatureShipment(replace(honest().block, rows=MAX_CONTEXT), honest().payload),
    "behind all positions": FeatureShipment(replace(honest().block, first=MAX_CONTEXT), honest().payload),
    "damaged": FeatureShipment(honest().block, bytes(len(honest().payload))),
    "another position's": FeatureShipment(replace(honest().block, first=1), honest().payload),
}


@pytest.mark.parametrize("shipment", HOSTILE.values(), ids=HOSTILE)
def test_what_was_not_asked_for_is_dropped_and_disturbs_nothing(intake: FeatureIntake, shipment: FeatureShipment):
    dropped = intake.add(*shipment)
    features = intake.add(*block(0, 4))

    assert dropped is None
    assert intake.dropped == 1
    assert features is not None
    assert np.array_equal(read(features), rows(0, 4).astype(np.float32))


def test_only_sequences_that_the_target_serves_have_rings_and_these_end_with_them(intake: FeatureIntake):
    features = intake.add(*block(0, 4))
    assert features is not None
    intake.end(ONE)
    late = intake.add(*block(4, 4))

    assert late is None
    assert not exists(features.name)


def test_a_sequence_that_starts_again_has_a_new_ring(intake: FeatureIntake):
    before = intake.add(*block(0, 4))
    intake.begin(ONE)
    again = intake.add(*block(0, 2))
    assert before is not None
    assert again is not None

    assert not exists(before.name)
    assert np.array_equal(read(again), rows(0, 2).astype(np.float32))


def test_another_tap_ends_all_rings_and_what_was_under_way(intake: FeatureIntake):
    before = intake.add(*block(0, 4))
    intake.tap(Tap((2,)))
    assert before is not None

    assert not exists(before.name)
    assert intake.add(*block(4, 4)) is None
    assert intake.add(*block(4, 4, FeatureForm((2,), 8))) is not None
    intake.tap(Tap(()))
    assert intake.add(*block(8, 4, FeatureForm((2,), 8))) is None
