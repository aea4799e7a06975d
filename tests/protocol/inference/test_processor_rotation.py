"""Laws of rotations that share their angles: they are MLX's own to the last bit, and angles are computed once."""

import sys
from itertools import product

import mlx.core as mx
import numpy as np
import pytest

from protocol.inference.processor_attention import Rotation, attention, processor_operations

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or mx.default_device() != mx.Device(mx.cpu), reason="only a Linux processor uses it"
)
_SIZE = 64
_OFFSETS = (0, 7, mx.array(9), mx.array([3]), mx.array([5, 900, 31]))
_FREQUENCIES = mx.exp(mx.arange(_SIZE // 2) / 3)


def numbers(*shape: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(sum(shape)))


@pytest.mark.parametrize("length", [1, 5, 300])
@pytest.mark.parametrize("offset", _OFFSETS)
@pytest.mark.parametrize("traditional", [False, True])
def test_it_is_mlx_own_rotation_to_the_last_bit(traditional: bool, offset: int | mx.array, length: int):
    batch = offset.size if isinstance(offset, mx.array) and offset.size > 1 else 2
    for dims, scale, freqs in product((_SIZE, 32), (1.0, 0.25), (None, _FREQUENCIES)):
        rotation, base, given = (
            Rotation(),
            None if freqs is not None else 1e4,
            None if freqs is None else freqs[: dims // 2],
        )
        for heads in (9, 3):
            rows = numbers(batch, heads, length, _SIZE)
            stock = mx.fast.rope(
                rows, dims, traditional=traditional, base=base, scale=scale, offset=offset, freqs=given
            )
            found = rotation(rows, dims, traditional=traditional, base=base, scale=scale, offset=offset, freqs=given)
            assert np.array_equal(np.array(found), np.array(stock)), (dims, scale, heads)


def test_layers_of_a_forward_share_their_angles(monkeypatch: pytest.MonkeyPatch):
    module = sys.modules[Rotation.__module__]
    stock, calls = mx.fast.rope, list[int | mx.array]()

    def counted(*arguments: mx.array | int, offset: int | mx.array, **others: object) -> mx.array:
        calls.append(offset)
        return stock(*arguments, offset=offset, **others)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "ROPE", counted)
    rotation, places = Rotation(), mx.array([4, 5, 5])
    for _ in range(3):
        for heads in (9, 3):
            rotation(numbers(1, heads, 3, _SIZE), _SIZE, traditional=False, base=1e4, scale=1.0, offset=4)
            rotation(numbers(3, heads, 1, _SIZE), _SIZE, traditional=False, base=1e4, scale=1.0, offset=places)
    assert len(calls) == 2

    rotation(numbers(1, 9, 3, _SIZE), _SIZE, traditional=False, base=1e6, scale=1.0, offset=4)
    assert len(calls) == 3


def test_half_precision_stays_mlx_own():
    rows = numbers(1, 4, 3, _SIZE).astype(mx.bfloat16)
    stock = mx.fast.rope(rows, _SIZE, traditional=False, base=1e4, scale=1.0, offset=2)
    found = Rotation()(rows, _SIZE, traditional=False, base=1e4, scale=1.0, offset=2)
    assert mx.array_equal(found, stock)


def test_each_forward_has_a_rotation_of_its_own_and_mlx_has_its_own_functions_back_behind_it():
    stock = mx.fast.rope, mx.fast.scaled_dot_product_attention
    with processor_operations():
        first = mx.fast.rope
        assert mx.fast.scaled_dot_product_attention is attention
    assert isinstance(first, Rotation)
    with pytest.raises(ZeroDivisionError), processor_operations():
        _ = 1 / int(mx.fast.rope is first)
    assert (mx.fast.rope, mx.fast.scaled_dot_product_attention) == stock
