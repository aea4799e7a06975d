"""Laws of conversion: the saved package gives the logits and the tokens of mlx-lm, in every architecture."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map, tree_map_with_path
from mlx_lm.utils import dequantize_model

from draft_worker.coreml.conversion.architectures import ARCHITECTURES
from draft_worker.coreml.conversion.checkpoint import Checkpoint
from draft_worker.coreml.conversion.weights import compress, restore
from draft_worker.coreml.converted import Converted
from draft_worker.coreml.runtime.runtimes import ExecutorRuntime
from draft_worker.coreml.runtime.tree_slots import TreeSlots
from draft_worker.engines.coreml import CoreMlEngine
from draft_worker.engines.mlx import MlxEngine
from protocol.errors import InputError
from protocol.inference.language_model import LanguageModel
from tests.support.coreml_lint import lint
from tests.support.models import architectures
from tests.support.models.architecture_sizes import WINDOW
from tests.support.models.coreml_runs import WIDTHS, Run, convert, half, tiny, tiny_of
from tests.support.models.tiny_models import VOCABULARY
from tests.support.twin_sequences import GREEDY, Twins

_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMAS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama tied": {"tie_word_embeddings": True},
    "llama with biases and wide heads": {"head_dim": 16, "attention_bias": True, "mlp_bias": True},
    "llama without shared keys": {"num_key_value_heads": 4},
    "llama with llama3 rope": {"architecture": "llama with llama3 rope"},
    "llama with linear rope": {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    "llama with yarn": {"rope_scaling": _YARN},
    "llama with interleaved rope": {"rope_traditional": True, "attention_bias": True},
    "llama in 4 bits": {"bits": 4},
    "qwen2": {"architecture": "qwen2"},
    "qwen2 in 8 bits": {"architecture": "qwen2", "bits": 8},
    "qwen3": {"architecture": "qwen3"},
    "qwen3 with yarn": {"architecture": "qwen3", "rope_scaling": _YARN, "tie_word_embeddings": True},
}

SLIDING, FULL = "sliding_attention", "full_attention"
BOTH = {"layer_types": [SLIDING, FULL], "sliding_window": WINDOW}
_LONGROPE = {"type": "longrope", "long_factor": [1.5] * 4, "short_factor": [1.0] * 4}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Mistral with a sliding window": ("llama", BOTH),
    "Ministral 3": ("ministral3", BOTH),
    "Ministral 3 with pictures": ("mistral3", BOTH),
    "SmolLM3": ("smollm3", {"no_rope_layers": [1, 0], "layer_types": None}),
    "SmolLM3 with a sliding window": ("smollm3", {"no_rope_layers": [1, 0], **BOTH}),
    "Phi-3": ("phi3", {}),
    "Phi-4 mini, partial rotation": ("phi3", {"partial_rotary_factor": 0.5}),
    "Phi-3 with longrope": (
        "phi3",
        {"partial_rotary_factor": 0.5, "rope_scaling": _LONGROPE, "original_max_position_embeddings": 128},
    ),
    "Gemma 2": ("gemma2", {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5}),
    "Gemma 3": ("gemma3_text", {"sliding_window_pattern": 2, "query_pre_attn_scalar": 24.0}),
    "Gemma 3 with pictures": ("gemma3", {"sliding_window_pattern": 2}),
    "LFM2": ("lfm2", {"layer_types": ["conv", FULL], "conv_bias": True}),
    "LFM2, convolutions around attention": ("lfm2", {"num_hidden_layers": 3, "layer_types": ["conv", FULL, "conv"]}),
}
PROMPT = [random.Random(1).randrange(VOCABULARY) for _ in range(2 * WINDOW + 5)]
EXACT = 2e-3
"""In standard deviations of the logits: scales and the norms' epsilon are fp16 in the graph."""
ROUNDING = 0.05
"""The same over two layers if every result is fp16."""


class Pair(NamedTuple):
    reference: Any
    """The stock model, with the same weights."""
    converted: Converted


def made(name: str) -> Any:
    if name in LLAMAS:
        return tiny(**LLAMAS[name])
    module, changes = OTHERS[name]
    return tiny_of(module, **changes)


@pytest.fixture(scope="module", params=[*LLAMAS, *OTHERS])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    reference = dequantize_model(made(request.param))
    if request.param in LLAMAS:
        reference.update(tree_map(half, reference.parameters()))
    return Pair(reference, convert(made(request.param), tmp_path_factory.mktemp("model") / "converted"))


def reference_logits(model: Any) -> np.ndarray:
    return np.array(model(mx.array([PROMPT]))[0])


def deviation(got: np.ndarray, want: np.ndarray) -> float:
    """The largest difference, in standard deviations of `want`."""
    return float(np.abs(got - want).max() / want.std())


def test_every_known_architecture_is_tested():
    modules = {entry.network.__module__.split(".")[-1] for entry in ARCHITECTURES}

    assert modules - {"qwen2", "qwen3"} <= {name for name, _ in OTHERS.values()}


@pytest.mark.sampled(4)
def test_logits_are_those_of_mlx_lm_at_every_width_and_fp16_only_rounds(pair: Pair):
    want = reference_logits(pair.reference)

    for width in WIDTHS:
        assert deviation(Run(pair.converted).chain(width, PROMPT), want) < EXACT
    assert 0 < deviation(Run(pair.converted, "fp16").chain(4, PROMPT), want) < ROUNDING


@pytest.mark.sampled(5)
def test_trees_give_the_tokens_of_their_paths_whatever_was_kept_and_dropped(pair: Pair):
    vocabulary = pair.converted.package.shape.vocabulary
    package = CoreMlEngine(pair.converted, ExecutorRuntime(pair.converted.file, "fp32"))
    stock = MlxEngine(LanguageModel(pair.reference), "")
    walk = Twins(*(each.open(GREEDY, vocabulary) for each in (package, stock)), seed=5, vocabulary=vocabulary)

    def assert_first_guesses_alike() -> None:
        ours, theirs = walk.evaluate(7)
        assert [each.tokens[0] for each in ours] == [each.tokens[0] for each in theirs]

    walk.prefill(WINDOW + 3)
    for _ in range(4):
        assert_first_guesses_alike()
        walk.keep()
    walk.truncate(WINDOW - 2)
    walk.prefill(WINDOW)
    assert_first_guesses_alike()


@pytest.mark.sampled(5)
def test_no_operation_leaves_the_neural_engine(pair: Pair):
    assert [finding for finding in lint(pair.converted.file) if finding.severity == "error"] == []


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

    assert deviation(Run(converted).chain(4, PROMPT), reference_logits(model)) < EXACT


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no window": (lambda: tiny_of("llama", layer_types=[SLIDING, FULL], sliding_window=None), "sliding_window"),
    "no positions": (lambda: tiny_of("gemma2"), "max_position_embeddings"),
    "one tap": (lambda: tiny_of("lfm2", layer_types=["conv", FULL], conv_L_cache=1), "conv_L_cache"),
    "an odd rotation": (lambda: tiny_of("phi3", partial_rotary_factor=0.44), "partial_rotary_factor"),
    "another architecture": (lambda: tiny_of("olmo2"), "olmo2.*lfm2"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_not_be_converted_is_refused_by_the_name_of_its_field(case: str):
    make, words = REFUSED[case]

    with pytest.raises(InputError, match=words):
        Checkpoint(make())


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "mistral3"])
def test_a_folder_is_read_with_the_fields_that_the_model_drops(name: str, tmp_path: Path):
    """mlx-lm's Gemma 2 forgets its positions; models with pictures hold the decoder as their language model."""
    changes: dict[str, Any] = {"num_hidden_layers": 2, "max_position_embeddings": 256}
    changes |= BOTH | {"rope_parameters": None} if name == "mistral3" else {"sliding_window_pattern": 2}
    model, config = tiny_of(name, **changes), architectures.configuration(name, **changes)
    (tmp_path / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), dict(tree_flatten(model.parameters())))

    loaded = Checkpoint.load(tmp_path)

    assert loaded.shape.positions == 256
    assert loaded.fingerprint() == Checkpoint(tiny_of(name, **changes), config=config).fingerprint()


def test_a_folder_in_the_newer_form_is_converted_with_its_positions(tmp_path: Path):
    mx.save_safetensors(str(tmp_path / "model.safetensors"), dict(tree_flatten(tiny_of("llama").parameters())))
    config = architectures.configuration("llama") | {"max_position_embeddings": 256}
    del config["rope_theta"]

    found = []
    for rope in ({"rope_theta": 5e5}, {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, {}):
        (tmp_path / "config.json").write_text(json.dumps(config | rope))
        found.append(Checkpoint.load(tmp_path).fingerprint())

    assert found[0] == found[1] != found[2]


def test_a_window_of_a_tree_is_that_of_each_node_s_own_path():
    source, table = random.Random(3), TreeSlots(128)
    table.keep(table.add(range(20), [-1, *range(19)]), ())
    numbers = table.add(range(12), [source.randrange(19, 20 + index) for index in range(12)])
    whole, within = (np.zeros((16, 128 + 16), np.float32) for _ in range(2))
    table.fill_mask(numbers, whole)
    table.fill_mask(numbers, within, window=5)

    assert (whole[:12] == 0).sum(axis=1).tolist() == [table.row(number).position + 1 for number in numbers]
    assert ((within[:12] == 0).sum(axis=1) == 5).all()
    assert (whole[:12][within[:12] == 0] == 0).all()
