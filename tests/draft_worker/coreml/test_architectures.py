"""Laws of every architecture that can be converted: the package gives the tokens of mlx-lm's own model."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map, tree_map_with_path

from draft_worker.coreml.conversion.architectures import ARCHITECTURES
from draft_worker.coreml.conversion.build import write
from draft_worker.coreml.conversion.checkpoint import Checkpoint
from draft_worker.coreml.conversion.lint import lint
from draft_worker.coreml.converted import Converted
from draft_worker.coreml.runtime.runtimes import ExecutorRuntime
from draft_worker.coreml.runtime.tree_slots import TreeSlots
from draft_worker.engine_interface import Batch
from draft_worker.engines.coreml import CoreMlEngine
from draft_worker.engines.mlx import MlxEngine
from protocol.contracts.coreml import Choices
from protocol.errors import InputError
from protocol.inference.language_model import LanguageModel
from protocol.messages.sampling import Sampling
from protocol.speculation.token_tree import Candidates
from tests.support.models import architectures
from tests.support.models.architecture_sizes import VOCABULARY, WINDOW
from tests.support.models.coreml_runs import CONTEXT, Run, half
from tests.support.twin_sequences import GREEDY, Twins

_SLIDING, _FULL = "sliding_attention", "full_attention"
_BOTH = {"layer_types": [_SLIDING, _FULL], "sliding_window": WINDOW}
_LONGROPE = {"type": "longrope", "long_factor": [1.5] * 4, "short_factor": [1.0] * 4}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Mistral with a sliding window": ("llama", _BOTH),
    "Ministral 3": ("ministral3", _BOTH),
    "Ministral 3 with pictures": ("mistral3", _BOTH),
    "SmolLM3": ("smollm3", {"no_rope_layers": [1, 0], "layer_types": None}),
    "SmolLM3 with a sliding window": ("smollm3", {"no_rope_layers": [1, 0], **_BOTH}),
    "Phi-3": ("phi3", {}),
    "Phi-4 mini, partial rotation": ("phi3", {"partial_rotary_factor": 0.5}),
    "Phi-3 with longrope": (
        "phi3",
        {"partial_rotary_factor": 0.5, "rope_scaling": _LONGROPE, "original_max_position_embeddings": 128},
    ),
    "Gemma 2": ("gemma2", {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5}),
    "Gemma 3": ("gemma3_text", {"sliding_window_pattern": 2, "query_pre_attn_scalar": 24.0}),
    "Gemma 3 with pictures": ("gemma3", {"sliding_window_pattern": 2}),
    "LFM2": ("lfm2", {"layer_types": ["conv", _FULL], "conv_bias": True}),
    "LFM2, convolutions around attention": ("lfm2", {"num_hidden_layers": 3, "layer_types": ["conv", _FULL, "conv"]}),
}
PROMPT = [random.Random(1).randrange(VOCABULARY) for _ in range(2 * WINDOW + 5)]
EXACT = 2e-3
"""In standard deviations of the logits: scales and the norms' epsilon are fp16 in the graph."""


class Pair(NamedTuple):
    reference: Any
    converted: Converted


def tiny(name: str, layers: int = 2, **changes: Any) -> Any:
    """A random model of two layers whose weights, and norms with their offset, fp16 holds."""
    model = architectures.tiny(name, **{"num_hidden_layers": layers, "max_position_embeddings": 512, **changes})
    model.update(tree_map(lambda weights: weights * 1.5 if weights.ndim == 2 else weights, model.parameters()))
    offset = 1.0 if "gemma" in name else 0.0
    model.update(
        tree_map_with_path(
            lambda path, weights: half(weights + offset) - offset if "norm" in path else half(weights),
            model.parameters(),
        )
    )
    mx.eval(model.parameters())
    return model


def checkpoint(model: Any) -> Checkpoint:
    # mlx-lm's Gemma 2 drops this field; a folder's config.json has it.
    return Checkpoint(model, config={"max_position_embeddings": 512})


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    name, changes = MODELS[request.param]
    folder = tmp_path_factory.mktemp("model") / "converted"
    write(checkpoint(tiny(name, **changes)), folder, Choices(widths=(1, 4, 16), context=CONTEXT))
    return Pair(tiny(name, **changes), Converted.open(folder))


def deviation(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.abs(got - want).max() / want.std())


def test_every_known_architecture_is_tested():
    modules = {entry.network.__module__.split(".")[-1] for entry in ARCHITECTURES}

    assert modules - {"qwen2", "qwen3"} <= {name for name, _ in MODELS.values()}


@pytest.mark.sampled(4)
def test_logits_are_those_of_mlx_lm_at_every_width(pair: Pair):
    want = np.array(pair.reference(mx.array([PROMPT]))[0])

    for width in (1, 4, 16):
        assert deviation(Run(pair.converted).chain(width, PROMPT), want) < EXACT


def assert_walks_alike(pair: Pair, seed: int, width: int) -> None:
    """Random trees of the package and of mlx-lm's model, whatever was kept, dropped and cut before."""
    package = CoreMlEngine(pair.converted, ExecutorRuntime(pair.converted, "fp32"))
    stock = MlxEngine(LanguageModel(pair.reference), "")
    ours, theirs = package.open(GREEDY, VOCABULARY), stock.open(GREEDY, VOCABULARY)
    walk = Twins(ours, theirs, seed, vocabulary=VOCABULARY)
    walk.prefill(WINDOW + 3)
    for _ in range(4):
        assert_first_guesses_alike(*walk.evaluate(width))
        walk.keep()
    walk.truncate(WINDOW - 2)
    walk.prefill(WINDOW)
    assert_first_guesses_alike(*walk.evaluate(width))


def assert_first_guesses_alike(ours: list[Candidates], theirs: list[Candidates]) -> None:
    assert [each.tokens[0] for each in ours] == [each.tokens[0] for each in theirs]


@pytest.mark.sampled(4)
def test_trees_give_the_tokens_of_their_paths_whatever_was_kept_and_dropped(pair: Pair):
    assert_walks_alike(pair, seed=5, width=7)


@pytest.mark.sampled(4)
def test_no_operation_leaves_the_neural_engine(pair: Pair):
    assert [finding for finding in lint(pair.converted.file) if finding.severity == "error"] == []


@pytest.mark.sampled(4)
def test_a_restarted_draft_finds_the_inputs_of_the_convolutions_in_its_arena(pair: Pair, registry: Path):
    engines = [CoreMlEngine(pair.converted, ExecutorRuntime(pair.converted), epoch=3, owner=1) for _ in range(2)]
    first, second = (engine.open(Sampling(), VOCABULARY) for engine in engines)
    first.prefill(PROMPT[:36])
    saved = first.save()
    assert saved is not None

    assert second.adopt(saved, range(saved.tokens)) == ""

    batch = Batch((), [1, 2, 3], [-1, -1, -1], 4)
    assert first.evaluate(batch) == second.evaluate(batch)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no window": (lambda: tiny("llama", layer_types=[_SLIDING, _FULL], sliding_window=None), "sliding_window"),
    "no positions": (lambda: tiny("gemma2"), "max_position_embeddings"),
    "one tap": (lambda: tiny("lfm2", layer_types=["conv", _FULL], conv_L_cache=1), "conv_L_cache"),
    "an odd rotation": (lambda: tiny("phi3", partial_rotary_factor=0.44), "partial_rotary_factor"),
    "another architecture": (lambda: tiny("olmo2"), "olmo2.*lfm2"),
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
    changes |= _BOTH | {"rope_parameters": None} if name == "mistral3" else {"sliding_window_pattern": 2}
    model, config = tiny(name, **changes), architectures.configuration(name, **changes)
    (tmp_path / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), dict(tree_flatten(model.parameters())))

    loaded = Checkpoint.load(tmp_path)

    assert loaded.shape.positions == 256
    assert loaded.fingerprint() == Checkpoint(tiny(name, **changes), config=config).fingerprint()


def test_a_folder_in_the_newer_form_is_converted_with_its_positions(tmp_path: Path):
    mx.save_safetensors(str(tmp_path / "model.safetensors"), dict(tree_flatten(tiny("llama").parameters())))
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
