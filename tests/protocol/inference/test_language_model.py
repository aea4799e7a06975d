"""Token trees give the logits of their paths after any earlier operations."""

import json
import random
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from protocol.errors import InputError
from protocol.inference import language_model, tree_sequence
from protocol.inference.joint_forward import ForwardPart
from protocol.inference.language_model import LanguageModel, stated_context
from protocol.inference.tree_sequence import TreeSequence
from protocol.messages.base import MAX_CONTEXT
from tests.support.models.architectures import configuration, tiny
from tests.support.models.tiny_models import ARCHITECTURES, VOCABULARY, network, stock_logits, tree_model

_PROMPT = (5, 9, 2, 33, 41, 7)
_TOKENS = (1, 2, 3, 4, 5, 6, 7)
_PARENTS = (-1, 0, 0, 1, -1, 3, 4)
_PATHS = ((1,), (1, 2), (1, 3), (1, 2, 4), (5,), (1, 2, 4, 6), (5, 7))


def _equal(ours: mx.array, theirs: mx.array) -> bool:
    return np.allclose(np.array(ours), np.array(theirs), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tree_logits_equal_those_of_each_path(architecture: str):
    model = tree_model(architecture)
    sequence = model.sequence()
    sequence.prefill(_PROMPT)

    logits = sequence.evaluate(_TOKENS, _PARENTS)

    for row, path in enumerate(_PATHS):
        assert _equal(logits[row], stock_logits(model.network, _PROMPT + path))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_joint_logits_are_those_of_each_sequence_alone(architecture: str):
    """Trees and chains behind prefixes of several lengths, the second time with dead slots between them."""
    model = tree_model(architecture)
    shapes = [(_TOKENS, _PARENTS), ((3, 4, 5), (-1, 0, 1)), ((6,), (-1,))]
    alone, together = [[_prefilled(model, length) for length in (6, 3, 5)] for _ in range(2)]

    for _ in range(2):
        parts = [
            ForwardPart(sequence, tokens, [-1 if parent < 0 else sequence.next_row + parent for parent in parents])
            for sequence, (tokens, parents) in zip(together, shapes, strict=True)
        ]
        expected = [sequence.evaluate(part.tokens, part.parents) for sequence, part in zip(alone, parts, strict=True)]

        assert all(map(_equal, model.evaluate_together(parts), expected))

        for sequence, part in zip((*alone, *together), parts * 2, strict=True):
            sequence.keep([sequence.next_row - len(part.tokens)], ())


def test_a_model_whose_attention_cannot_be_joined_evaluates_in_turns(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(language_model, "can_join", lambda _: False)
    monkeypatch.setattr(language_model, "evaluate_together", None)
    model = tree_model()

    found = model.evaluate_together([ForwardPart(_prefilled(model, 4), _TOKENS, _PARENTS) for _ in range(2)])

    assert all(_equal(logits, _prefilled(model, 4).evaluate(_TOKENS, _PARENTS)) for logits in found)


def _prefilled(model: LanguageModel, length: int) -> TreeSequence:
    sequence = model.sequence()
    sequence.prefill(_PROMPT[:length])
    return sequence


def test_a_tree_without_committed_tokens():
    model = tree_model()

    logits = model.sequence().evaluate(_TOKENS, _PARENTS)

    for row, path in enumerate(_PATHS):
        assert _equal(logits[row], stock_logits(model.network, path))


def test_a_wrapped_model_still_serves_mlx_lm_itself():
    plain = stock_logits(network(), _PROMPT)

    assert mx.array_equal(stock_logits(tree_model().network, _PROMPT), plain)


def test_a_chain_costs_no_mask():
    sequence = tree_model().sequence()
    sequence.prefill(_PROMPT)
    sequence.evaluate((1, 2), (-1, 0))
    sequence.keep([0], [])
    sequence.evaluate((3,), (-1,))

    assert sequence.caches[0].forward[:4] == (len(_PROMPT) + 1, 1, None, None)


def test_prefill_in_chunks_equals_prefill_at_once():
    model = tree_model()
    chunked, whole = model.sequence(), model.sequence()
    for begin in range(0, len(_PROMPT), 2):
        chunked.prefill(_PROMPT[begin : begin + 2])
    whole.prefill(_PROMPT)

    assert _equal(chunked.evaluate((1,), (-1,)), whole.evaluate((1,), (-1,)))


class _Walk:
    """A sequence and plain lists of its expected contents."""

    def __init__(self, model: LanguageModel, chance: random.Random) -> None:
        self.model, self.chance = model, chance
        self.sequence = model.sequence()
        self.sequence.prefill(_PROMPT)
        self.committed = _PROMPT
        self.tails: dict[int, tuple[int, ...]] = {}
        self.parents: dict[int, int] = {}

    def grow(self) -> None:
        first = self.sequence.next_row
        count = self.chance.randint(1, 9)
        tokens = [self.chance.randrange(VOCABULARY) for _ in range(count)]
        parents = [self.chance.choice([-1, *self.tails, *range(first, first + index)]) for index in range(count)]
        logits = self.sequence.evaluate(tokens, parents)
        for row, token, parent in zip(range(first, first + count), tokens, parents, strict=True):
            self.tails[row] = (*self.tails.get(parent, ()), token)
            self.parents[row] = parent
            assert self.sequence.position(row) == len(self.committed) + len(self.tails[row]) - 1
        probe = self.chance.randrange(count)
        expected = stock_logits(self.model.network, self.committed + self.tails[first + probe])
        assert _equal(logits[probe], expected)

    def keep(self) -> None:
        path = self._ancestry(self.chance.choice(list(self.tails)))[: self.chance.randint(0, 3)]
        surviving = [row for row in self.tails if row not in path and self._ancestry(row)[: len(path)] == path]
        self.sequence.keep(path, surviving)
        self.committed += self.tails[path[-1]] if path else ()
        self.tails = {row: self.tails[row][len(path) :] for row in surviving}
        self.parents = {row: self.parents[row] if self.parents[row] in surviving else -1 for row in surviving}

    def truncate(self) -> None:
        self.committed = self.committed[: len(self.committed) - self.chance.randint(0, 2)]
        self.tails, self.parents = {}, {}
        self.sequence.truncate(len(self.committed))

    def _ancestry(self, row: int) -> list[int]:
        return [*self._ancestry(self.parents[row]), row] if row in self.tails else []


@pytest.mark.parametrize("dead_slots", [1, 5, 10_000])
def test_any_walk_of_growing_and_keeping_equals_fresh_evaluation(dead_slots: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tree_sequence, "_DEAD_SLOTS", dead_slots)
    walk = _Walk(tree_model(), random.Random(dead_slots))
    for _ in range(20):
        walk.grow()
        walk.keep()
        if walk.chance.random() < 0.2:
            walk.truncate()
        assert walk.sequence.committed == len(walk.committed)
    walk.truncate()
    walk.sequence.prefill(_PROMPT)

    logits = walk.sequence.evaluate((8,), (-1,))

    assert _equal(logits[0], stock_logits(walk.model.network, (*walk.committed, *_PROMPT, 8)))


@pytest.mark.parametrize("length", [1, 40, 10_000])
def test_a_copy_and_its_original_are_independent(length: int):
    walk = _Walk(tree_model(), random.Random(length))
    for _ in range(20):
        walk.grow()
        walk.keep()
    length = min(length, len(walk.committed))
    copy = walk.sequence.copy(length)
    copy.prefill(_PROMPT)
    walk.grow()
    walk.keep()
    walk.truncate()

    assert copy.committed == length + len(_PROMPT)
    expected = stock_logits(walk.model.network, (*walk.committed[:length], *_PROMPT, 8))
    assert _equal(copy.evaluate((8,), (-1,))[0], expected)
    assert _equal(walk.sequence.evaluate((8,), (-1,))[0], stock_logits(walk.model.network, (*walk.committed, 8)))


def test_surviving_rows_keep_their_numbers_and_values_through_a_move(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tree_sequence, "_DEAD_SLOTS", 1)
    model = tree_model()
    sequence = model.sequence()
    sequence.prefill(_PROMPT)
    sequence.evaluate((10, 11, 12, 13, 14), (-1, -1, 0, 1, 3))
    sequence.keep([1], [3, 4])

    logits = sequence.evaluate((20, 21), (4, 3))

    assert _equal(logits[0], stock_logits(model.network, (*_PROMPT, 11, 13, 14, 20)))
    assert _equal(logits[1], stock_logits(model.network, (*_PROMPT, 11, 13, 21)))


def test_dead_slots_never_pile_up():
    sequence = tree_model().sequence()
    for _ in range(60):
        first = sequence.next_row
        sequence.evaluate((1, 2, 3, 4), (-1, -1, -1, first + 2))
        sequence.keep([first + 2], [first + 3])
        sequence.keep([], [])

    assert sequence._table.dead < 64
    assert sequence._table.size < sequence.committed + 64 + 4


def test_sequences_of_one_model_do_not_disturb_each_other():
    model = tree_model()
    one, other = model.sequence(), model.sequence()
    one.prefill(_PROMPT)
    other.prefill(_PROMPT[::-1])
    first = one.evaluate(_TOKENS, _PARENTS)
    second = other.evaluate((1,), (-1,))

    assert _equal(first[5], stock_logits(model.network, (*_PROMPT, 1, 2, 4, 6)))
    assert _equal(second[0], stock_logits(model.network, (*_PROMPT[::-1], 1)))


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


def test_a_model_that_ignores_the_mask_evaluates_one_token_at_a_time():
    model = network()
    model.layers[0].self_attn.__class__ = _Unmasked

    made = LanguageModel(model)

    assert (made.level, made.level_reason) == ("plain", "a tree gives other logits than its tokens one by one")


class _Unmasked(type(network().layers[0].self_attn)):
    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        return super().__call__(x, None, cache)


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


def test_a_quantized_model_is_unpacked_for_the_processor(tmp_path: Path):
    model = network()
    nn.quantize(model, group_size=32, bits=4)
    expected = stock_logits(model, _PROMPT)
    _save(model, tmp_path, quantization={"group_size": 32, "bits": 4})

    loaded = LanguageModel.load(tmp_path)

    assert not any(isinstance(module, nn.QuantizedLinear) for module in loaded.network.modules())
    assert np.allclose(np.array(stock_logits(loaded.network, _PROMPT)), np.array(expected), atol=0.05)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_an_incomplete_folder_is_refused(missing: str, tmp_path: Path):
    _save(network(), tmp_path)
    (tmp_path / missing).unlink()

    with pytest.raises(InputError, match=r"holds no model.*name a folder"):
        LanguageModel.load(tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "unheard_of"},
        {"model_type": 7},
        {"intermediate_size": 48},
        {"hidden_size": 64},
        {"model_file": "code.py"},
        {"num_attention_heads": "four"},
    ],
)
def test_a_folder_that_mlx_lm_can_not_load_is_refused(config: dict[str, object], tmp_path: Path):
    _save(network(), tmp_path, **config)

    with pytest.raises(InputError, match=r"can't be loaded.*download it again") as refused:
        LanguageModel.load(tmp_path)
    assert str(tmp_path) in str(refused.value)


def test_broken_files_are_refused(tmp_path: Path):
    _save(network(), tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="can't be loaded"):
        LanguageModel.load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(InputError, match="has no whole header: download it again"):
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
