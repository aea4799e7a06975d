"""Laws of known logits: every sampler chooses the recorded token, in mlx-lm's own loops too."""

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.sample_utils import make_sampler

from protocol.inference.recorded_network import KnownText, RecordedNetwork, point_logits
from protocol.messages.sampling import Sampling
from protocol.sampling.sampler import Noise, scores
from tests.support.models.tiny_models import VOCABULARY, network

_TEXT = (5, 9, 2, 33, 41, 7, 5, 9, 12, 66, 0, 3)
_PROMPT = 4


@pytest.mark.parametrize("temperature", [0.0, 0.01, 0.7, 1.0, 100.0])
def test_shared_noise_never_changes_the_token(temperature: float):
    logits = point_logits(_TEXT, VOCABULARY)
    sampling = Sampling(temperature=temperature, seed=11)

    picks = mx.argmax(scores(logits, list(range(len(_TEXT))), sampling, Noise(VOCABULARY)), axis=-1)

    assert picks.tolist() == list(_TEXT)


def test_logits_follow_the_position_and_repeat_the_last_token_behind_the_text():
    logits = KnownText(_TEXT, VOCABULARY).logits((0, 7, 10, 11, 40))

    assert mx.argmax(logits, axis=-1).tolist() == [9, 12, 3, 3, 3]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_plain_decoding_by_mlx_lm_generates_the_text(temperature: float):
    target: Any = RecordedNetwork(KnownText(_TEXT, VOCABULARY))
    mx.random.seed(5)

    steps = generate_step(mx.array(_TEXT[:_PROMPT]), target, max_tokens=8, sampler=make_sampler(temp=temperature))

    assert tuple(int(token) for token, _ in steps) == _TEXT[_PROMPT:]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("draft_tokens", [1, 2, 5])
def test_speculative_decoding_by_mlx_lm_generates_the_text(temperature: float, draft_tokens: int):
    target: Any = RecordedNetwork(KnownText(_TEXT, VOCABULARY))
    mx.random.seed(5)

    steps = speculative_generate_step(
        mx.array(_TEXT[:_PROMPT]),
        target,
        network(seed=3),
        num_draft_tokens=draft_tokens,
        max_tokens=8,
        sampler=make_sampler(temp=temperature),
    )

    assert tuple(token for token, _, _ in steps) == _TEXT[_PROMPT:]
