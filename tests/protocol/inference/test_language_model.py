"""Token trees give the logits of their paths after any earlier operations; damaged folders are refused by name."""

import json
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache

from protocol.errors import InputError
from protocol.inference import language_model
from protocol.inference.joint_forward import ForwardPart
from protocol.inference.language_model import LanguageModel, impossible_windows, stated_context
from protocol.inference.tree_sequence import TreeSequence
from protocol.messages.base import MAX_CONTEXT
from tests.support.models.architectures import configuration, tiny
from tests.support.models.tiny_models import alike, network, stock_logits, tree_model

_PROMPT = (5, 9, 2, 33, 41, 7)
_TOKENS = (1, 2, 3, 4, 5, 6, 7)
_PARENTS = (-1, 0, 0, 1, -1, 3, 4)
_PATHS = ((1,), (1, 2), (1, 3), (1, 2, 4), (5,), (1, 2, 4, 6), (5, 7))


def test_a_model_whose_attention_cannot_be_joined_evaluates_in_turns(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(language_model, "can_join", lambda _: False)
    monkeypatch.setattr(language_model, "evaluate_together", None)
    model = tree_model()

    found = model.evaluate_together([ForwardPart(_prefilled(model, 4), _TOKENS, _PARENTS) for _ in range(2)])

    assert all(alike(logits, _prefilled(model, 4).evaluate(_TOKENS, _PARENTS)) for logits in found)


def _prefilled(model: LanguageModel, length: int) -> TreeSequence:
    sequence = model.sequence()
    sequence.prefill(_PROMPT[:length])
    return sequence


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "deepseek_v3"])
def test_a_forward_lets_mlx_look_for_no_part_of_the_network(family: str, monkeypatch: pytest.MonkeyPatch):
    model, looked_for = LanguageModel(tiny(family)), list[str]()
    find = nn.Module.__getattr__

    def watched(module: nn.Module, name: str) -> Any:
        found = find(module, name)
        if isinstance(found, nn.Module):
            looked_for.append(name)
        return found

    monkeypatch.setattr(nn.Module, "__getattr__", watched)
    model.sequence().evaluate([1], [-1])

    assert looked_for == []


def test_a_part_that_is_replaced_later_computes_from_then_on():
    model = LanguageModel(tiny("qwen3"))
    before = model.sequence().prefill([1, 2])
    layer: Any = model.network.layers[0]
    layer.mlp = nn.Linear(layer.mlp.down_proj.weight.shape[0], layer.mlp.down_proj.weight.shape[0])
    after = model.sequence().prefill([1, 2])

    assert before is not None
    assert after is not None
    assert not mx.allclose(before, after).item()


def test_a_tree_without_committed_tokens():
    model = tree_model()

    logits = model.sequence().evaluate(_TOKENS, _PARENTS)

    for row, path in enumerate(_PATHS):
        assert alike(logits[row], stock_logits(model.network, path))


def test_a_wrapped_model_still_serves_mlx_lm_itself():
    plain = stock_logits(network(), _PROMPT)

    assert mx.array_equal(stock_logits(tree_model().network, _PROMPT), plain)


def test_dead_slots_never_pile_up():
    sequence = tree_model().sequence()
    for _ in range(60):
        first = sequence.next_row
        sequence.evaluate((1, 2, 3, 4), (-1, -1, -1, first + 2))
        sequence.keep([first + 2], [first + 3])
        sequence.keep([], [])

    assert sequence._table.dead < 64
    assert sequence._table.size < sequence.committed + 64 + 4


def test_a_model_that_mlx_lm_can_not_run_is_refused():
    model = network()
    del model.layers[1].self_attn.rope

    with pytest.raises(InputError, match=r"can't be served \(.*\): .* Download it again"):
        LanguageModel(model)


def test_a_model_may_compute_positions_as_array():
    model = network()
    model.layers[0].self_attn.__class__ = _Reckoning

    assert LanguageModel(model).level == "tree"


def test_a_model_that_computes_with_the_offset_evaluates_paths():
    model = network()
    model.layers[0].self_attn.__class__ = _Counting

    made = LanguageModel(model)

    assert made.level == "chain"
    assert "in its own way" in made.level_reason


class _Counting(type(network().layers[0].self_attn)):
    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        return super().__call__(x * (1 + 0.01 * (cache.offset + 1)), mask, cache)


class _Reckoning(type(network().layers[0].self_attn)):
    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        ages = mx.arange(x.shape[1]) + cache.offset
        return super().__call__(x * (1 + 0.01 * ages)[None, :, None], mask, cache)


def _save(model: nn.Module, folder: Path, **config: object) -> None:
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    known = {key: value for key, value in vars(model.args).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(known | config))


def test_a_saved_model_loads_in_float32(tmp_path: Path):
    model = network()
    model.set_dtype(mx.float16)
    _save(model, tmp_path)

    loaded = LanguageModel.load(tmp_path)

    assert (loaded.vocabulary, loaded.context, loaded.architecture, loaded.folder) == (67, 512, "llama", tmp_path)
    assert loaded.sequence().evaluate((1,), (-1,)).dtype == mx.float32


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_an_incomplete_folder_is_refused(missing: str, tmp_path: Path):
    _save(network(), tmp_path)
    (tmp_path / missing).unlink()

    with pytest.raises(InputError, match=r"holds no model.*name a folder"):
        LanguageModel.load(tmp_path)


@pytest.mark.parametrize(
    ("config", "context"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"n_positions": 1024, "n_ctx": 512}, 1024),
        ({"text_config": {"max_position_embeddings": 131_072}}, 131_072),
        ({"max_position_embeddings": None, "model_max_length": 2048}, 2048),
        ({"max_position_embeddings": "many"}, MAX_CONTEXT),
        ({"max_position_embeddings": 1 << 40}, MAX_CONTEXT),
        ({}, MAX_CONTEXT),
    ],
)
def test_the_context_is_what_config_json_states_by_whichever_name(config: dict[str, Any], context: int):
    assert stated_context(config) == context


def test_the_context_is_that_of_the_file_where_mlx_lm_drops_it(tmp_path: Path):
    """The arguments of Gemma 2's model in mlx-lm have no such field."""
    model = tiny("gemma2")
    (tmp_path / "config.json").write_text(json.dumps(configuration("gemma2") | {"max_position_embeddings": 300}))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), dict(tree_flatten(model.parameters())))

    assert not hasattr(model.args, "max_position_embeddings")
    assert LanguageModel.load(tmp_path).context == 300


def refusal(folder: Path, name: str, without: str = "nothing", **changes: Any) -> str:
    """The sentence for a tiny model whose config.json has `changes`, and whose weights lack a part."""
    weights = dict(tree_flatten(tiny(name).parameters()))
    kept = {key: array for key, array in weights.items() if without not in key}
    mx.save_safetensors(str(folder / "model.safetensors"), kept)
    (folder / "config.json").write_text(json.dumps(configuration(name) | changes))
    with pytest.raises(InputError) as refused:
        LanguageModel.load(folder)
    return str(refused.value)


def test_windows_are_found_among_several_caches_of_a_layer():
    caches = [CacheList(KVCache(), RotatingKVCache(max_size=0)), RotatingKVCache(max_size=8)]

    assert impossible_windows(caches) == [0]


_CHUNKED = configuration("llama4")["text_config"]
NO_LAYER = ("layers.1.", {}, "can't be loaded \\(Missing.*layers.1.")
DAMAGES: list[tuple[str, str, dict[str, Any], str]] = [
    *((name, *NO_LAYER) for name in ("gemma3_text", "qwen3_next", "rwkv7")),
    ("gemma3_text", "nothing", {"num_hidden_layers": 6}, "layers.4."),
    ("qwen3_next", "nothing", {"model_type": "qwen9_next"}, "can't be loaded .Model type qwen9_next not supported"),
    *((name, "nothing", {"vocab_size": 0}, "") for name in ("llama", "qwen3", "gemma3_text")),
    ("llama", "nothing", {"num_attention_heads": 0}, "by zero"),
    ("gemma3_text", "nothing", {"sliding_window_pattern": 0}, "by zero"),
    *(
        ("llama", "nothing", {name: value}, "download it again")
        for name, value in [
            *(("model_type", 7), ("intermediate_size", 48), ("hidden_size", 32)),
            *(("model_file", "code.py"), ("num_attention_heads", "four")),
        ]
    ),
    *(
        (name, "nothing", {field: window}, f"states a window of {window!r} tokens")
        for name, field in (("gemma3_text", "sliding_window"), ("mimo_v2_flash", "sliding_window_size"))
        for window in (0, -5, "16", 16.5, None, True)
    ),
    *(
        (
            "llama4",
            "nothing",
            {"text_config": _CHUNKED | {"attention_chunk_size": chunk}},
            f"a window of {chunk!r} tokens",
        )
        for chunk in (0, "16")
    ),
]


@pytest.mark.parametrize(("name", "without", "changes", "words"), DAMAGES)
def test_a_folder_that_mlx_lm_can_not_load(
    name: str, without: str, changes: dict[str, Any], words: str, tmp_path: Path
):
    found = refusal(tmp_path, name, without, **changes)

    assert str(tmp_path) in found
    assert re.search(words, found)
