"""Laws of known logits: every sampler chooses the recorded token."""

import mlx.core as mx
import pytest

from protocol.inference.recorded_network import KnownText, point_logits
from protocol.messages.sampling import Sampling
from protocol.sampling.gumbel_noise import Noise, scores
from tests.support.models.tiny_models import VOCABULARY

_TEXT = (5, 9, 2, 33, 41, 7, 5, 9, 12, 66, 0, 3)


@pytest.mark.parametrize("temperature", [0.0, 0.01, 0.7, 1.0, 100.0])
def test_shared_noise_never_changes_the_token(temperature: float):
    logits = point_logits(_TEXT, VOCABULARY)
    sampling = Sampling(temperature=temperature, seed=11)

    picks = mx.argmax(scores(logits, list(range(len(_TEXT))), sampling, Noise(VOCABULARY)), axis=-1)

    assert picks.tolist() == list(_TEXT)


def test_logits_follow_the_position_and_repeat_the_last_token_behind_the_text():
    logits = KnownText(_TEXT, VOCABULARY).logits((0, 7, 10, 11, 40))

    assert mx.argmax(logits, axis=-1).tolist() == [9, 12, 3, 3, 3]
