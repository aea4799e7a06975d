"""A conversion of the target prefills prompts for it: KV and tokens equal the target's own."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from draft_worker.coreml.conversion.build import convert
from draft_worker.prefill.coreml import CoreMlPrefillEngine, as_element
from orchestrator import Pipeline, SamplingParams
from orchestrator.machine.checkpoints import demo_model
from protocol.contracts.coreml import Choices
from protocol.inference.language_model import LanguageModel
from protocol.kv.arena_header import ElementType

TARGET = demo_model("target")
TOKENS = tuple(np.random.default_rng(4).integers(0, 4096, 90).tolist())
PROMPT = "def merge(left, right):\n    result = []\n    while left and right:\n" * 6


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prefill") / "target"
    convert(TARGET, folder, Choices(context=256))
    return folder


@pytest.mark.thorough
def test_the_rows_equal_those_of_the_target(converted):
    engine = CoreMlPrefillEngine.load(converted, TARGET)
    sequence = engine.open()
    chunks = [sequence.prefill(chunk) for chunk in (TOKENS[:50], TOKENS[50:])]
    own = LanguageModel.load(TARGET).sequence()
    own.prefill(TOKENS)
    expected = own.export(0, len(TOKENS))

    for half in (0, 1):
        for layer, rows in enumerate(expected[half]):
            read = np.concatenate([chunk[half][layer] for chunk in chunks], axis=1)
            assert read.dtype == rows.dtype
            assert np.abs(read - rows).max() < 1e-3


@pytest.mark.thorough
def test_a_second_prompt_does_not_see_the_first(converted):
    engine = CoreMlPrefillEngine.load(converted, TARGET)
    alone = [np.array(layer) for layer in engine.open().prefill(TOKENS[:20])[0]]
    engine.open().prefill(TOKENS[20:80])
    again = engine.open().prefill(TOKENS[:20])[0]

    assert all(np.array_equal(one, other) for one, other in zip(alone, again, strict=True))


def test_bfloat16_rows_are_stored_as_bits():
    rows = np.array([[1.0, -2.5, 3.140625]], np.float32)
    bits = as_element(rows, ElementType.BFLOAT16)

    assert bits.dtype == np.uint16
    assert np.array_equal(np.array(mx.array(bits).view(mx.bfloat16).astype(mx.float32)), rows)


@pytest.mark.thorough
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
def test_tokens_equal_those_of_the_target_alone(temperature):
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=24)
    with Pipeline(strategy="ar", arena_memory=0) as alone:
        expected = alone.generate(PROMPT, params)
    with Pipeline(prefill_engine="coreml", prefill="always") as pipeline:
        pipeline.generate("import os", SamplingParams(max_tokens=1))
        result = pipeline.generate(PROMPT, params)

    assert result.tokens == expected.tokens
    assert result.statistics.adopted_tokens > 60
