"""Laws of attention on a processor, by numpy and by the library: it is MLX's own, for every mask, and only where it is
asked for."""

import os
import sys

import mlx.core as mx
import numpy as np
import pytest

from protocol.inference.processor_attention import attention

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or mx.default_device() != mx.Device(mx.cpu), reason="only a Linux processor uses it"
)
_BATCH, _HEADS, _GROUPS, _LENGTH, _TOTAL = 2, 6, 3, 9, 400
"""More scores than the fewest for which numpy is used."""


def numbers(*shape: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(sum(shape)))


def inputs(total: int = _TOTAL) -> tuple[mx.array, mx.array, mx.array]:
    keys, values = numbers(_BATCH, _GROUPS, total, 16), numbers(_BATCH, _GROUPS, total, 24)
    return numbers(_BATCH, _HEADS, _LENGTH, 16), keys, values


_MASKS = (
    *(None, "causal", mx.arange(_TOTAL) % 3 > 0, mx.arange(_LENGTH)[:, None] <= mx.arange(_TOTAL)),
    mx.arange(_LENGTH * _TOTAL).reshape(1, 1, _LENGTH, _TOTAL) % 5 > 0,
    *(numbers(_HEADS, _LENGTH, _TOTAL), numbers(_BATCH, 1, _LENGTH, _TOTAL)),
)


@pytest.mark.parametrize(
    ("total", "mask"), [*((_TOTAL, mask) for mask in _MASKS), *((total, "causal") for total in (1023, 1024, 3000))]
)
def test_it_is_mlx_own_attention_for_every_mask_and_beyond_a_chunk_of_values(total: int, mask: mx.array | str | None):
    given = inputs(total)
    assert _BATCH * _HEADS * _LENGTH * _TOTAL > 1 << 15
    stock = mx.fast.scaled_dot_product_attention(*given, scale=0.3, mask=mask)
    found = attention(*given, scale=0.3, mask=mask)
    assert found.shape == stock.shape
    assert np.allclose(np.array(found), np.array(stock), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("total", [300, 341, 342, 2000, 5461, 5462])
def test_a_query_does_not_depend_on_those_beside_it(total: int):
    """On both sides of where numpy takes over, for one token and for all."""
    queries, keys, values = numbers(2, _HEADS, 32, 16), numbers(2, _GROUPS, total, 16), numbers(2, _GROUPS, total, 24)
    whole = np.array(attention(queries, keys, values, scale=0.3))
    for length in (1, 2, 7, 11, 17):
        fewer = np.array(attention(queries[:, :, :length], keys, values, scale=0.3))
        assert np.array_equal(fewer, whole[:, :, :length])


@pytest.mark.parametrize("total", [100, 344, 348, 352, 700, 1028, 1035, 1500, 4100])
def test_a_query_does_not_depend_on_the_keys_that_it_does_not_see(total: int):
    """On both sides of where numpy takes over, and across it, and of where another chunk of values begins: heads of one
    value each, and few of them in a chunk, so that products are exact."""
    queries, keys = numbers(2, _HEADS, 12, 1), numbers(2, _GROUPS, total, 1)
    values = mx.zeros((2, _GROUPS, total, 1))
    values[:, :, :3] = numbers(2, _GROUPS, 3, 1)
    values[:, :, 1024::1024] = numbers(2, _GROUPS, len(range(1024, total, 1024)), 1)
    whole = np.array(attention(queries, keys, values, scale=0.3, mask="causal"))
    for row in range(12):
        seen = total - 11 + row
        alone = attention(queries[:, :, row : row + 1], keys[:, :, :seen], values[:, :, :seen], scale=0.3)
        assert np.array_equal(np.array(alone), whole[:, :, row : row + 1]), row


def test_sinks_and_half_precision_stay_mlx_own():
    given = inputs()
    sinks = numbers(_HEADS)
    stock = mx.fast.scaled_dot_product_attention(*given, scale=0.3, sinks=sinks)
    assert np.array_equal(np.array(attention(*given, scale=0.3, sinks=sinks)), np.array(stock))
    half = [each.astype(mx.float16) for each in given]
    stock = mx.fast.scaled_dot_product_attention(*half, scale=0.3)
    assert np.array_equal(np.array(attention(*half, scale=0.3)), np.array(stock))


PRELOADED = "bridge-" in os.environ.get("LD_PRELOAD", "")
with_the_library = pytest.mark.skipif(not PRELOADED, reason="for the process that `test_whole_layers.py` starts")


@with_the_library
@pytest.mark.parametrize("total", [1, 2, 15, 16, 17, 255, 256, 257, 1000])
def test_the_library_computes_few_rows(total: int, monkeypatch: pytest.MonkeyPatch):
    queries, keys, values = numbers(1, _HEADS, 8, 20), numbers(1, _GROUPS, total, 20), numbers(1, _GROUPS, total, 70)
    seen = mx.arange(8 * total).reshape(8, total) % 4 > 0
    stock = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.3, mask=seen | (mx.arange(total) == 0))
    nothing = mx.zeros((8, total)) > 0

    monkeypatch.setattr(np, "exp", None)
    found = attention(queries, keys, values, scale=0.3, mask=seen | (mx.arange(total) == 0))

    assert np.allclose(np.array(found), np.array(stock), rtol=1e-5, atol=1e-6)
    assert np.isnan(np.array(attention(queries, keys, values, scale=0.3, mask=nothing))).all()


@with_the_library
@pytest.mark.parametrize("mask", [None, "causal", mx.arange(1500) % 3 > 0, numbers(_HEADS, 200, 1500)], ids=str)
def test_the_library_computes_the_rows_of_a_prompt_in_pieces(
    mask: mx.array | str | None, monkeypatch: pytest.MonkeyPatch
):
    queries, keys, values = numbers(2, _HEADS, 200, 20), numbers(2, _GROUPS, 1500, 20), numbers(2, _GROUPS, 1500, 70)
    stock = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.3, mask=mask)
    monkeypatch.setattr(np, "exp", None)
    whole = np.array(attention(queries, keys, values, scale=0.3, mask=mask))

    monkeypatch.setattr("protocol.inference.processor_attention._SCRATCH", 1)
    pieces = np.array(attention(queries, keys, values, scale=0.3, mask=mask))

    assert np.allclose(whole, np.array(stock), rtol=1e-5, atol=1e-6)
    assert np.array_equal(pieces, whole)


@with_the_library
def test_keys_and_values_need_not_lie_in_one_piece():
    queries, arena = numbers(2, _HEADS, 5, 16), numbers(2, 600, _GROUPS, 16)
    keys, values = arena.swapaxes(1, 2)[:, :, :300], arena.swapaxes(1, 2)[:, :, 300:]
    transposed = mx.contiguous(keys.swapaxes(2, 3)).swapaxes(2, 3)
    right = attention(queries, mx.contiguous(keys), mx.contiguous(values), scale=0.3)
    for form in (keys, transposed):
        assert np.array_equal(np.array(attention(queries, form, values, scale=0.3)), np.array(right))


@with_the_library
def test_exponentials_are_exact_to_two_units_of_the_last_place():
    """Two keys with the scores 0 and x: the second one's share s gives e^x = s / (1 - s)."""
    x = -np.linspace(0, 20, 4001, dtype=np.float32)
    queries, keys = mx.ones((4001, 1, 1, 1)), mx.array(np.stack([0 * x, x], 1)[:, None, :, None])
    first = np.array(attention(queries, keys, mx.array([1.0, 0.0]).reshape(1, 1, 2, 1) + 0 * keys, scale=1.0)).ravel()
    assert np.abs(first * (1 + np.exp(x.astype(np.float64))) - 1).max() < 4e-7
