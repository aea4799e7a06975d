"""Laws of the mixture: the draft's distribution and prompt lookup's guesses, each with its share."""

import mlx.core as mx
import numpy as np
import pytest

from draft_worker.candidates.lookup_mixture import mix, mixed

_LOGITS = np.random.default_rng(3).standard_normal((3, 50)).astype(np.float32)
_FOLLOWERS = ([(3, 0.5), (7, 0.2)], [], [(1, 0.3)])


def softmax(logits: np.ndarray, temperature: float) -> np.ndarray:
    powers = np.exp(logits.astype(np.float64) / (temperature or 1.0))
    return powers / powers.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize("kind", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("temperature", [0.0, 0.2, 0.7, 1.3])
def test_each_row_is_the_weighted_sum_of_both(temperature: float, kind: mx.Dtype):
    logits = mx.array(_LOGITS).astype(kind)
    own = np.array(logits.astype(mx.float32))
    expected = softmax(own, temperature)
    for row, found in enumerate(_FOLLOWERS):
        expected[row] *= 1 - sum(chance for _, chance in found)
        for column, chance in found:
            expected[row, column] += chance

    assert softmax(np.array(mixed(logits, _FOLLOWERS, temperature)), temperature) == pytest.approx(expected, abs=1e-5)


def test_it_is_the_same_in_place():
    logits = _LOGITS.copy()
    mix(logits, _FOLLOWERS, 0.7)

    assert logits == pytest.approx(np.array(mixed(mx.array(_LOGITS), _FOLLOWERS, 0.7)), abs=1e-5)


def test_what_can_not_be_sampled_stays_out():
    banned = _LOGITS.copy()
    banned[0, 3] = -np.inf
    result = np.array(mixed(mx.array(banned), _FOLLOWERS, 0.7))
    mix(banned, _FOLLOWERS, 0.7)

    assert result[0, 3] == banned[0, 3] == -np.inf
    assert banned == pytest.approx(result, abs=1e-5)


def test_a_row_without_followers_does_not_change():
    assert np.array(mixed(mx.array(_LOGITS), _FOLLOWERS, 0.7))[1].tolist() == _LOGITS[1].tolist()
