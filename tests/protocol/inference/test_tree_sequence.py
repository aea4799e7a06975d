"""KV exported from one sequence and adopted by another are equal to the last bit; forwards cost no needless kernels."""

from contextlib import nullcontext
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map

from protocol.inference import joint_forward, tree_sequence
from protocol.inference.joint_forward import ForwardPart
from protocol.inference.language_model import LanguageModel
from protocol.inference.layer_caches.full_attention import FullAttentionCache
from protocol.inference.tree_sequence import TreeSequence
from protocol.kv.arena import LayerRows
from protocol.kv.arena_header import ArenaLayout, ElementType
from tests.support.graphs import primitives
from tests.support.models.architectures import tiny
from tests.support.models.tiny_models import ARCHITECTURES, ELEMENT, alike, network, stock_logits, tree_model

PROMPT = tuple(np.random.default_rng(1).integers(0, 67, 100).tolist())


def prefilled(model: LanguageModel, tokens: tuple[int, ...] = PROMPT) -> TreeSequence:
    sequence = model.sequence()
    sequence.prefill(tokens)
    return sequence


def adopted(model: LanguageModel, rows: tuple[LayerRows, LayerRows], tokens: int) -> TreeSequence:
    sequence = model.sequence()
    assert model.layout is not None
    sequence.adopt(*rows, tokens, model.layout.dtype)
    return sequence


def logits(sequence: TreeSequence) -> np.ndarray:
    """Logits of a small tree behind the sequence."""
    first = sequence.next_row
    return np.array(sequence.evaluate((1, 2, 3, 4), (-1, first, first, first + 1)).astype(mx.float32))


def gappy(model: LanguageModel) -> TreeSequence:
    """The prompt, committed from trees so that dead slots and live rows lie between its tokens."""
    sequence = prefilled(model, PROMPT[:60])
    for token in PROMPT[60:]:
        first = sequence.next_row
        sequence.evaluate((11, 12, token, 13), (-1, first, -1, first + 2))
        sequence.keep([first + 2], [first + 3])
        sequence.keep([], [])
    sequence.evaluate((7, 8), (-1, sequence.next_row))
    return sequence


@pytest.mark.parametrize("kind", [mx.float16, mx.bfloat16, mx.float32])
def test_every_element_type_survives_to_the_last_bit(kind: mx.Dtype):
    network_ = network()
    network_.update(tree_map(lambda weights: weights.astype(kind), network_.parameters()))
    model = LanguageModel(network_)

    other = adopted(model, prefilled(model).export(0, 100), 100)

    assert model.layout is not None
    assert model.layout.dtype.name == str(kind).removeprefix("mlx.core.").upper()
    np.testing.assert_array_equal(logits(other), logits(prefilled(model)))


def test_a_partial_export_is_a_slice_of_the_whole():
    source = gappy(tree_model())
    whole, part = source.export(0, 100), source.export(37, 81)

    for half, piece in zip(whole, part, strict=True):
        for layer, rows in zip(half, piece, strict=True):
            np.testing.assert_array_equal(rows, layer[:, 37:81])


def test_rows_behind_the_tokens_are_ignored():
    model = tree_model()
    keys, values = (
        [np.concatenate([rows, np.full((2, 30, 8), np.nan, rows.dtype)], axis=1) for rows in half]
        for half in prefilled(model).export(0, 100)
    )

    np.testing.assert_array_equal(logits(adopted(model, (keys, values), 100)), logits(prefilled(model)))


def test_later_changes_of_a_sequence_do_not_change_its_export():
    source = prefilled(tree_model())
    keys, _ = source.export(0, 100)
    before = [rows.copy() for rows in keys]
    source.truncate(50)
    source.prefill(PROMPT[::-1][:50])

    np.testing.assert_array_equal(keys, before)


def test_a_model_states_its_layout():
    own = ElementType[str(ELEMENT).removeprefix("mlx.core.").upper()]

    assert tree_model("qwen3").layout == ArenaLayout(2, 2, 512, 8, own)


def holding(*layers: tuple[tuple[int, ...], tuple[int, ...]]) -> TreeSequence:
    """A sequence whose layers hold keys and values of these shapes."""
    sequence = TreeSequence(tree_model().network)
    for cache, (keys, values) in zip(sequence.caches, layers, strict=True):
        assert isinstance(cache, FullAttentionCache)
        cache.adopt(mx.zeros(keys), mx.zeros(values))
    return sequence


def test_layers_and_keys_and_values_that_differ_have_no_layout():
    narrow, wide = (1, 2, 256, 8), (1, 2, 256, 16)

    assert holding((narrow, narrow), (narrow, narrow)).layout(512) is not None
    assert holding((narrow, narrow), (wide, wide)).layout(512) is None
    assert holding((narrow, wide), (narrow, wide)).layout(512) is None


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_is_cut_off_frees_its_memory_and_the_rest_goes_on(architecture: str):
    model = tree_model(architecture)
    whole, part = prefilled(model, PROMPT * 8), prefilled(model, PROMPT * 4)
    whole.shorten(400)

    assert whole.committed == 400
    assert whole.memory <= part.memory
    np.testing.assert_allclose(logits(whole), logits(part), rtol=1e-4, atol=1e-4)


def test_the_first_tokens_behind_a_copy_need_no_new_arrays():
    """They would be as long as all others, and a forward that fills them no measure of the next one."""
    copied = prefilled(tree_model("llama")).copy(len(PROMPT))
    before = copied.memory

    copied.prefill(PROMPT[1:])

    assert copied.memory == before


def test_states_are_forgotten_until_the_last_token_s_alone_is_left():
    sequence = LanguageModel(tiny("qwen3_next")).sequence()
    for begin in range(0, 90, 30):
        sequence.prefill(PROMPT[begin : begin + 30])
    reached, memory = [sequence.reach(89)], [sequence.memory]
    while sequence.shed():
        reached.append(sequence.reach(89))
        memory.append(sequence.memory)

    assert reached == [60, 60, 0, 0]
    assert memory[0] > memory[1] > memory[2]
    assert sequence.reach(90) == 90


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_5"])
@pytest.mark.parametrize(("slots", "masked"), [(20, False), (24, True)])
def test_behind_a_long_context_a_lone_token_needs_no_mask(
    name: str, slots: int, masked: bool, monkeypatch: pytest.MonkeyPatch
):
    """MLX has a kernel for 8,192 keys and more that takes none."""
    monkeypatch.setattr(tree_sequence, "_MASK_COSTS", slots)
    model = LanguageModel(tiny(name))
    sequence = prefilled(model, PROMPT[:20])
    first = sequence.next_row
    mx.eval(sequence.evaluate((1, 2, 3), (-1, -1, first + 1)))
    sequence.keep([first + 1, first + 2], ())
    found = sequence.evaluate((4,), (-1,))

    assert any(isinstance(cache.forward.mask, mx.array) for cache in sequence.caches) is masked
    expected = stock_logits(model.network, (*PROMPT[:20], 2, 3, 4))
    assert alike(found[0], expected, 1e-4)


def test_a_forward_gathers_nothing_but_its_embeddings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`x[0]` is a gather, which copies (MLX, python/src/indexing.cpp, mlx_get_item_int); a squeeze is none."""
    for module in (tree_sequence, joint_forward):
        # A forward on a Linux processor is computed layer by layer, so it leaves no graph of its first layers.
        monkeypatch.setattr(module, "processor_operations", nullcontext)
    model = tree_model()
    parts = [ForwardPart(prefilled(model), (1, 2, 3), (-1, -1, 1)) for _ in range(2)]
    joint = model.evaluate_together([part._replace(parents=(-1, -1, part.sequence.next_row)) for part in parts])
    sequence = prefilled(model)
    assert model.tap is not None
    model.record((0, 1))
    alone = sequence.evaluate((1, 2, 3), (-1, -1, sequence.next_row + 1))
    model.record(())
    assert sequence.recorded is not None

    for found in (joint[0], alone, sequence.recorded.rows):
        assert primitives(found, tmp_path).count("Gather") == 1
