"""The default pair itself, from a package index: it answers, its tokens are mlx-lm's, and in half precision rounding
decides between nearly tied tokens alone. Needs a network."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import dequantize_model

from orchestrator import Pipeline, SamplingParams
from orchestrator.lab.first_light.widths import sentences
from orchestrator.lab.forwards import TIE, Compared, ForwardOrder, Ties
from orchestrator.lab.forwards_process import examine
from orchestrator.text.tokenizer import TextCodec
from protocol.inference.language_model import LanguageModel
from protocol.inference.stored_model import load_network
from tests.support.default_pair import DefaultPair, default_pair
from tests.support.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
PROMPT, PLACES = 32, 40
WIDTHS = (5, 12)


@pytest.fixture
def pair() -> Iterator[DefaultPair]:
    with default_pair() as pair:
        yield pair


def model_of(folder: Path, kind: mx.Dtype) -> LanguageModel:
    network, config = load_network(folder)
    network: Any = dequantize_model(network)
    network.set_dtype(kind)
    return LanguageModel(network, folder, config)


def greedy(folder: Path, prompt: list[int], count: int) -> list[int]:
    """What mlx-lm's model alone generates."""
    mx.set_default_device(mx.cpu)
    network = model_of(folder, mx.float32).network
    cache, tokens, inputs = make_prompt_cache(network), [], prompt
    for _ in range(count):
        logits = network(mx.array([inputs]), cache=cache)
        inputs = [int(np.argmax(np.array(logits[0, -1])))]
        tokens += inputs
    return tokens


def test_it_knows_the_capital_of_france(pair: DefaultPair):
    with Pipeline() as pipeline:
        prompt = pipeline.chat_prompt("What is the capital of France?")
        result = pipeline.generate(prompt, SamplingParams(temperature=0.0, max_tokens=16))

    assert "Paris" in result.text
    assert list(result.tokens) == greedy(pair.target, prompt, len(result.tokens))


@pytest.mark.parametrize("kind", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("role", ["target", "draft"])
def test_rounding_decides_between_nearly_tied_tokens_alone(pair: DefaultPair, role: str, kind: mx.Dtype):
    """`-s` prints what was counted; the log has figures of 120 places."""
    tokens = tuple(TextCodec(pair.target).encode((ROOT / "README.md").read_text())[: PROMPT + PLACES])
    model = model_of(getattr(pair, role), kind)
    assert (model.level, model.joins) == ("tree", True), model.level_reason
    order = ForwardOrder(tokens=tokens, prompt=PROMPT, compared=WIDTHS)
    reports = list(examine(model, order, time.perf_counter))

    print("", role, kind, *reports, *sentences(reports), sep="\n")
    compared = [one for one in reports if isinstance(one, Compared)]
    assert all((one.gap or 0.0) < TIE for one in compared)
    assert any(isinstance(one, Ties) for one in reports)
