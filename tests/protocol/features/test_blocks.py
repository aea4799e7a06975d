"""Laws of feature blocks: what arrives is what was sent, or nothing."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from msgspec.structs import replace

from protocol.features.blocks import as_float32, received, shipments
from protocol.kv.arena_header import ElementType
from protocol.messages.base import MAX_CONTEXT, RequestId
from protocol.messages.features import FeatureForm, FeatureShipment
from protocol.messages.remote import MAX_PAYLOAD

FORM = FeatureForm((0, 2), width=8)
ONE = RequestId(1)


def sent(rows: np.ndarray, first: int = 0, form: FeatureForm = FORM) -> list[FeatureShipment]:
    return list(shipments(ONE, 3, first, form, ElementType.FLOAT16, rows))


def numbers(count: int, width: int = 16) -> np.ndarray:
    return np.random.default_rng(count).standard_normal((count, width)).astype(np.float16)


@given(count=st.integers(0, 300), first=st.integers(0, 1000))
def test_blocks_hold_all_rows_in_order_and_none_is_too_large(count: int, first: int):
    form = FeatureForm((0, 2), width=4096)
    rows = np.repeat(numbers(count, 16), 512, axis=1)

    blocks = sent(rows, first, form)

    assert all(len(payload) <= MAX_PAYLOAD for _, payload in blocks)
    expected = first
    arrived = []
    for block, payload in blocks:
        assert (block.first, block.request, block.round) == (expected, 1, 3)
        expected += block.rows
        found = received(block, payload)
        assert found is not None
        arrived += list(found)
    assert expected == first + count
    np.testing.assert_array_equal(np.array(arrived).reshape(rows.shape), rows)


@pytest.mark.parametrize("element", list(ElementType))
def test_every_element_type_arrives(element: ElementType):
    rows = np.arange(32).reshape(2, 16).astype(element.numpy_name)

    ((block, payload),) = shipments(ONE, 3, 0, FORM, element, rows)

    np.testing.assert_array_equal(received(block, payload), as_float32(rows, element))


def test_a_row_larger_than_a_frame_is_not_sent():
    form = FeatureForm(tuple(range(16)), 1 << 15)

    assert sent(np.zeros((1, 16 << 15), np.float16), form=form) == []


@given(place=st.integers(0, 3 * 32 - 1), bit=st.integers(0, 7))
def test_a_flipped_bit_is_noticed(place: int, bit: int):
    ((block, payload),) = sent(numbers(3))
    damaged = bytearray(payload)
    damaged[place] ^= 1 << bit

    assert received(block, bytes(damaged)) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"first": 1},
        {"first": MAX_CONTEXT},
        {"rows": 2},
        {"rows": 4},
        {"rows": MAX_CONTEXT},
        {"form": FeatureForm((0, 2), 7)},
        {"form": FeatureForm((0, 1, 2), 8)},
        {"element": 3},
        {"element": 9},
        {"checksum": 0},
    ],
)
def test_a_block_that_does_not_fit_its_bytes_gives_nothing(changes: dict[str, object]):
    ((block, payload),) = sent(numbers(3))

    assert received(replace(block, **changes), payload) is None


@given(st.binary(max_size=200))
def test_bytes_of_any_other_length_give_nothing(payload: bytes):
    ((block, _),) = sent(numbers(3))

    assert received(block, payload) is None


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_numbers_that_are_not_finite_give_nothing(bad: float):
    rows = numbers(3)
    rows[2, 7] = bad
    ((block, payload),) = sent(rows)

    assert received(block, payload) is None
