"""Laws of the draft's candidates: ranked by the target's score, mixed with prompt lookup."""

import mlx.core as mx
import numpy as np
import pytest

from draft_worker.candidates.ranking import mix, mixed, propose
from draft_worker.engine_interface import Batch
from protocol.messages.sampling import Sampling
from protocol.sampling.gumbel_noise import Noise, scores
from protocol.speculation.token_tree import Candidates

COUPLED = Sampling(temperature=1.0, seed=11)


def proposed(values: list[list[float]], sampling: Sampling, batch: Batch) -> list[Candidates]:
    logits = mx.array(values)
    return propose(logits, list(range(50, 50 + len(values))), sampling, batch, Noise(logits.shape[-1]))


def asking(limit: int) -> Batch:
    return Batch([], [], [], limit)


def random_logits(rows: int, width: int, seed: int) -> list[list[float]]:
    return (3 * np.random.default_rng(seed).normal(size=(rows, width))).tolist()


@pytest.mark.parametrize("sampling", [Sampling(), COUPLED])
def test_candidates_are_ranked_by_the_target_s_score(sampling: Sampling):
    logits = random_logits(6, 300, seed=1)
    expected = scores(mx.array(logits), range(50, 56), sampling, Noise(300))

    found = proposed(logits, sampling, asking(4))
    assert [each.tokens[0] for each in found] == np.array(mx.argmax(expected, axis=-1)).tolist()
    share = np.array(mx.softmax(expected, axis=-1))
    for row, each in zip(share, found, strict=True):
        assert np.allclose(row[list(each.tokens)], each.probabilities, atol=1e-5)


@pytest.mark.parametrize("sampling", [Sampling(), COUPLED])
def test_probabilities_fall_and_stay_within_bounds(sampling: Sampling):
    for each in proposed([*random_logits(6, 300, seed=4), [100.0] + [0.0] * 299], sampling, asking(8)):
        assert list(each.probabilities) == sorted(each.probabilities, reverse=True)
        assert all(0 <= chance <= 1 for chance in each.probabilities)


def test_probabilities_on_a_gpu_and_a_cpu_agree(monkeypatch: pytest.MonkeyPatch):
    logits = random_logits(4, 300, seed=3)
    here = proposed(logits, COUPLED, asking(4))
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    there = proposed(logits, COUPLED, asking(4))

    assert [each.tokens for each in there] == [each.tokens for each in here]
    assert [each.probabilities for each in there] == [pytest.approx(each.probabilities, rel=1e-4) for each in here]


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


def test_what_can_not_be_sampled_stays_out_and_it_is_the_same_in_place():
    banned = _LOGITS.copy()
    banned[0, 3] = -np.inf
    result = np.array(mixed(mx.array(banned), _FOLLOWERS, 0.7))
    mix(banned, _FOLLOWERS, 0.7)

    assert result[0, 3] == banned[0, 3] == -np.inf
    assert result[1].tolist() == _LOGITS[1].tolist(), "it has no followers"
    assert banned == pytest.approx(result, abs=1e-5)
