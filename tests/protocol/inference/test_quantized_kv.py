"""Quantized keys and values: inexact against 16 bits, exact against themselves, in every architecture."""

import os
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import settings

from protocol.contracts.model_folder import KvBits, kv_fingerprint
from protocol.errors import InputError
from protocol.inference import quantized_kv, tree_sequence
from protocol.inference.language_model import LanguageModel
from protocol.inference.layer_caches.full_attention import QuantizedRows, quantized_rows
from protocol.inference.quantized_kv import deviation
from protocol.inference.tree_sequence import TreeSequence
from protocol.kv.arena_header import ArenaMismatch
from protocol.kv.exchange import KvExchange
from protocol.messages.kv import KvReference
from tests.protocol.inference.test_architecture_levels import CONTEXT, TREES, grown, joint, paths, tokens
from tests.protocol.inference.test_layer_cache import Sequences
from tests.support.element_types import types_of
from tests.support.models.architectures import tiny, tiny_with_wide_heads
from tests.support.models.tiny_models import ELEMENT, alike, tree_model
from tests.support.paths import DEMO_TARGET

KINDS = {
    "llama": True,
    "gemma3_text": True,  # windows
    "gemma3n": True,  # layers that share KV
    "gpt_oss": False,  # attention sinks
    "deepseek_v3": False,  # latent keys
    "gemma2": False,  # attention of its own
}
"""One architecture of each kind, and whether its attention reads quantized rows."""


@pytest.fixture(autouse=True, scope="module")
def as_on_a_gpu() -> Iterator[None]:
    """Attention reads quantized rows where it can. On a processor it does not, as in tests/end_to_end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantized_kv, "unpacking_is_faster", lambda: False)
        yield


@cache
def model(name: str, bits: KvBits) -> LanguageModel:
    return LanguageModel(tiny_with_wide_heads(name), Path(name), kv_bits=bits)


def plainly(made: LanguageModel, text: list[int]) -> TreeSequence:
    """A sequence of the committed text, evaluated token by token."""
    sequence = made.sequence()
    for token in text:
        following(sequence, [token])
    return sequence


def following(sequence: TreeSequence, path: Sequence[int]) -> mx.array:
    """The logits behind a path that is evaluated token by token, and committed."""
    rows = []
    for token in path:
        rows.append(sequence.evaluate([token], [-1])[0])
        sequence.keep([sequence.next_row - 1], ())
    return rows[-1]


def assert_paths(made: LanguageModel, logits: mx.array, prefix: list[int], tree: list[int]) -> None:
    plain = plainly(made, prefix)
    for row, path in enumerate(paths(tree)):
        assert alike(logits[row], following(plain.copy(len(prefix)), path)), row


def assert_exact_against_itself(name: str, bits: KvBits) -> None:
    """Prefilled in chunks, in trees, with slots moved and cut: what plain decoding with the same bits gives."""
    made, text = model(name, bits), tokens(CONTEXT, 1)
    sequence = made.sequence()
    for begin, end in ((0, 1), (1, 8), (8, CONTEXT)):
        sequence.prefill(text[begin:end])
    for round in range(2):
        first = sequence.next_row
        tree, logits = grown(sequence, round)
        assert_paths(made, logits, text, tree)
        sequence.keep([first, first + 1], [first + 3])
        text += tree[:2]
    sequence.truncate(CONTEXT // 2)
    sequence.prefill(text[sequence.committed : CONTEXT // 2])
    tree, logits = grown(sequence, 9)
    assert_paths(made, logits, text[: CONTEXT // 2], tree)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", [*KINDS, "qwen3_next"])
def test_every_way_of_evaluating_a_path_gives_the_same(name: str, bits: KvBits, monkeypatch: pytest.MonkeyPatch):
    """Also where only some layers are quantized: the others are recurrent."""
    monkeypatch.setattr(tree_sequence, "_DEAD_SLOTS", 8)
    assert_exact_against_itself(name, bits)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(TREES) - set(KINDS) - {"minicpm3"}))
def test_so_it_is_for_all_architectures(name: str, monkeypatch: pytest.MonkeyPatch):
    """Of minicpm3 the heads can't be widened without the rest."""
    monkeypatch.setattr(tree_sequence, "_DEAD_SLOTS", 8)
    assert_exact_against_itself(name, 8)


@pytest.mark.parametrize(("name", "fused"), KINDS.items())
def test_attention_reads_quantized_rows_where_mlx_lm_can(name: str, fused: bool):
    sequence = model(name, 8).sequence()
    sequence.prefill([1, 2, 3])

    assert all(hasattr(cache, "bits") == fused for cache in sequence.caches)
    assert all({array.dtype for array in cache.arrays} >= {mx.uint32} for cache in sequence.caches)
    assert types_of([cache.arrays for cache in sequence.caches]) == {ELEMENT}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", KINDS)
def test_eight_bits_are_nearly_the_models_own_element_type(name: str):
    text = tokens(CONTEXT, 2)
    own, eight, four = (following(model(name, bits).sequence(), text) for bits in (16, 8, 4))

    assert 0 < deviation(eight, own) < 0.1
    assert deviation(eight, own) < deviation(four, own)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss"])
def test_joint_forwards_give_the_same(name: str):
    made = model(name, 8)
    assert made.joins
    for logits, text, tree in joint(made):
        assert_paths(made, logits, text, tree)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("element", [mx.float16, mx.bfloat16, mx.float32])
def test_a_rows_bytes_depend_on_that_row_alone_and_survive_packing(bits: int, element: mx.Dtype):
    rows = (mx.random.normal((1, 2, 9, 96), key=mx.random.key(1)) * 5).astype(element)
    encoding = QuantizedRows(bits, 32, fused=False)
    assert encoding == quantized_rows(bits, (96, 64), fused=False)
    together = encoding.encoded(rows)
    for row in range(9):
        single = encoding.encoded(rows[:, :, row : row + 1])
        assert all(same(part, whole[:, :, row : row + 1]) for part, whole in zip(single, together, strict=True))
    packed = encoding.packed(together)

    assert packed.dtype == element
    assert all(same(one, other) for one, other in zip(encoding.unpacked(packed), together, strict=True))


def same(one: mx.array, other: mx.array) -> bool:
    """Bit by bit."""
    return bool(mx.array_equal(mx.contiguous(one).view(mx.uint8), mx.contiguous(other).view(mx.uint8)).item())


@pytest.mark.parametrize("bits", [8, 4])
def test_memory_is_that_of_the_bits_and_of_a_scale_and_a_bias_a_group(bits: KvBits):
    """Of a model with heads of 64."""
    own = 8 * ELEMENT.size
    sizes: dict[str, Any] = {"hidden_size": 256}
    sequences = [tree_model(**sizes).sequence(), quantized(bits, **sizes).sequence()]
    for sequence in sequences:
        sequence.prefill([1, 2, 3])

    assert sequences[1].memory / sequences[0].memory == (bits + 2 * own / 64) / own


def quantized(bits: KvBits, **changes: Any) -> LanguageModel:
    return LanguageModel(tree_model(**changes).network, kv_bits=bits)


def test_heads_that_no_group_divides_are_refused():
    with pytest.raises(InputError, match=r"can't be held in 8 bits.*groups of 32.*leave out --kv-bits"):
        LanguageModel(tiny("llama"), kv_bits=8)


def test_a_layer_that_no_group_divides_keeps_its_element_type():
    """The layers without wide heads of this model have none; the other layers are quantized."""
    made = model("nemotron-nas", 8)
    sequence = made.sequence()
    sequence.prefill([1, 2, 3])

    assert {array.dtype for cache in sequence.caches for array in cache.arrays} >= {mx.uint32, ELEMENT}


@pytest.mark.usefixtures("registry")
def test_kv_of_other_bits_is_never_adopted():
    made = LanguageModel.load(DEMO_TARGET, kv_bits=8)
    assert made.layout is not None
    exchanges = {
        bits: KvExchange(made.layout, fingerprint=kv_fingerprint(DEMO_TARGET, bits), epoch=1, owner=os.getpid())
        for bits in (16, 8, 4)
    }
    sequence = made.sequence()
    sequence.prefill([1, 2, 3])
    arena = exchanges[8].create(3)
    try:
        arena.write_rows(0, *sequence.export(0, 3))
        arena.commit(3)
        for bits in (16, 4):
            with pytest.raises(ArenaMismatch):
                exchanges[bits].adopt(KvReference(arena.name, 3))
        exchanges[8].adopt(KvReference(arena.name, 3)).close()
    finally:
        arena.close()
        arena.unlink()


class QuantizedSequences(Sequences):
    """The laws of all layer caches, with quantized ones: the logits are those of a new sequence."""

    @property
    def model(self) -> LanguageModel:
        return quantized_for_laws()

    def answers(self, sequence: TreeSequence, committed: Sequence[int]) -> bool:
        logits = sequence.evaluate((8,), (-1,))[0]
        sequence.keep((), ())
        return alike(logits, following(self.model.sequence(), [*committed, 8]))


@cache
def quantized_for_laws() -> LanguageModel:
    return quantized(8, hidden_size=128, max_position_embeddings=4096)


TestQuantizedSequences = QuantizedSequences.TestCase
TestQuantizedSequences.settings = settings(max_examples=5, stateful_step_count=12, derandomize=True)
