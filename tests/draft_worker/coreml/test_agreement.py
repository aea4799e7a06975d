"""Laws of conversion: the saved package computes the logits of mlx-lm."""

import random
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map, tree_map_with_path
from mlx_lm.utils import dequantize_model, load_model
from tokenizers import Tokenizer

from draft_worker.coreml.conversion.build import convert as convert_folder
from draft_worker.coreml.conversion.weights import compress, restore
from draft_worker.coreml.converted import Converted
from protocol.contracts.coreml import Choices
from tests.support.models.coreml_runs import MODELS, WIDTHS, Run, convert, half, tiny
from tests.support.models.tiny_models import VOCABULARY
from tests.support.paths import DEMO_DRAFT, ROOT

PROMPT = [random.Random(1).randrange(VOCABULARY) for _ in range(21)]
EXACT = 1e-3
"""In standard deviations of the logits: 1/sqrt(head) and the norms' epsilon are fp16 in the graph."""
ROUNDING = 0.05
"""The same over two layers if every result is fp16."""


class Pair(NamedTuple):
    reference: Any
    """The stock model, with the same weights."""
    converted: Converted


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    given, reference = tiny(**MODELS[request.param]), dequantize_model(tiny(**MODELS[request.param]))
    reference.update(tree_map(half, reference.parameters()))
    return Pair(reference, convert(given, tmp_path_factory.mktemp("model") / "converted"))


def reference_logits(model: Any, tokens: list[int]) -> np.ndarray:
    return np.array(model(mx.array([tokens]))[0])


def deviation(got: np.ndarray, want: np.ndarray) -> float:
    """The largest difference, in standard deviations of `want`."""
    return float(np.abs(got - want).max() / want.std())


@pytest.mark.sampled(6)
@pytest.mark.parametrize("width", WIDTHS)
def test_logits_are_those_of_mlx_lm_at_every_width(pair: Pair, width: int):
    got = Run(pair.converted).chain(width, PROMPT)

    assert deviation(got, reference_logits(pair.reference, PROMPT)) < EXACT


@pytest.mark.sampled(6)
def test_fp16_only_rounds(pair: Pair):
    got = Run(pair.converted, "fp16").chain(4, PROMPT)

    assert 0 < deviation(got, reference_logits(pair.reference, PROMPT)) < ROUNDING


@pytest.mark.thorough
def test_a_head_in_chunks_gives_the_same_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    whole = Run(convert(tiny(), tmp_path / "whole")).chain(4, PROMPT)
    monkeypatch.setattr("draft_worker.coreml.conversion.weights._CHANNELS", 32)
    converted = convert(tiny(), tmp_path / "chunks")

    assert converted.package.outputs == (32, 32, 3)
    assert np.array_equal(Run(converted).chain(4, PROMPT), whole)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["int8", "4bit"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_compressed_weights_are_the_only_difference(architecture: str, kind: Any, tmp_path: Path):
    def compressed(name: str, weights: mx.array) -> mx.array:
        if weights.ndim < 2 or "embed" in name:
            return weights
        stored = compress(np.array(weights.astype(mx.float16)), "int8" if "lm_head" in name else kind)
        return mx.array(restore(stored).astype(np.float32))

    model = tiny(architecture)
    converted = convert(tiny(architecture), tmp_path / "model", weights=kind)
    model.update(tree_map_with_path(compressed, model.parameters()))

    assert deviation(Run(converted).chain(4, PROMPT), reference_logits(model, PROMPT)) < EXACT


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "share"), [("fp16", 0.98), ("int8", 0.92), ("4bit", 0.65)])
def test_the_converted_demo_draft_keeps_its_most_probable_tokens(kind: Any, share: float, tmp_path: Path):
    """The share of tokens at which the fp16 package has the model's most probable token. So small a model has no
    redundancy: 4 bits change a quarter of them, like MLX's own 4 bits."""
    demo = DEMO_DRAFT
    network, _ = load_model(demo)
    network.set_dtype(mx.float32)
    source = (ROOT / "protocol" / "inference" / "slots.py").read_text()
    tokens = Tokenizer.from_file(str(demo / "tokenizer.json")).encode(source).ids[:192]

    convert_folder(demo, tmp_path / "model", Choices(widths=(32,), context=256, weights=kind))
    got = Run(Converted.open(tmp_path / "model"), "fp16").chain(32, tokens)

    assert (got.argmax(-1) == reference_logits(network, tokens).argmax(-1)).mean() >= share
