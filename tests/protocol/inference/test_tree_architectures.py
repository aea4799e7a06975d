"""Of every architecture of the installed mlx-lm whose caches hold trees, trees give the logits of their paths."""

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from protocol.errors import InputError
from protocol.inference import tree_sequence
from protocol.inference.joint_forward import ForwardPart
from protocol.inference.language_model import LanguageModel
from protocol.inference.tree_sequence import TreeSequence
from tests.support.models.architecture_sizes import VOCABULARY, WINDOW
from tests.support.models.architectures import IMPOSSIBLE, modules, tiny

RECURRENT = {
    *("baichuan_m1", "bailing_hybrid", "bailing_moe_linear", "bailing_moe_v3", "falcon_h1", "gear", "granitemoehybrid"),
    *("jamba", "kimi_k3", "kimi_linear", "lfm2", "lfm2-vl", "lfm2_moe", "longcat_flash_ngram", "mamba", "mamba2"),
    *("nemotron_h", "olmo_hybrid", "plamo2", "prism_hadamard_qwen35", "qwen3_5", "qwen3_5_moe", "qwen3_next"),
    *("recurrent_gemma", "rwkv7"),
}
CACHES_WITHOUT_TREES = {"deepseek_v32", "deepseek_v41", "glm_moe_dsa", "llama4", "longcat_flash", "minimax_m3_vl"}
OWN_POSITIONS = {"afm7", "gpt2", "gpt_bigcode", "ministral3", "mistral4", "nanochat", "talkie"}
"""They compute with the offset."""
OWN_MASKS = {"phi3small"}
"""It sees later tokens in prefill: a boolean mask is added to its scores."""
NARROWER_WHEN_DECODING = {"plamo3"}
"""mlx-lm masks its prompts with a window that is wider by one than the cache's."""
REFUSED = RECURRENT | CACHES_WITHOUT_TREES | OWN_POSITIONS | OWN_MASKS
TREES = sorted(set(modules()) - REFUSED - set(IMPOSSIBLE))
CONTEXT = 3 * WINDOW + 2
TREE = (-1, 0, 0, 1, -1, 3, 4)
MOST = 1e-3
"""Largest mean deviation, in standard deviations of the logits."""


@cache
def model(name: str) -> LanguageModel:
    return LanguageModel(tiny(name), Path(name))


def tokens(count: int, seed: int) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(VOCABULARY) for _ in range(count)]


def path_logits(name: str, text: Sequence[int]) -> mx.array:
    """Of mlx-lm's own model and caches, behind the last token."""
    network = model(name).network
    stock = make_prompt_cache(network)
    if name in NARROWER_WHEN_DECODING:
        for token in text[:-1]:
            network(mx.array([[token]]), cache=stock)
        text = text[-1:]
    return network(mx.array([list(text)]), cache=stock)[0, -1]


def assert_paths(name: str, logits: mx.array, prefix: Sequence[int], tree: Sequence[int]) -> None:
    """`logits` are those of TREE behind the prefix."""
    paths: list[list[int]] = []
    for parent, token in zip(TREE, tree, strict=True):
        paths.append([*([] if parent < 0 else paths[parent]), token])
    for row, path in enumerate(paths):
        expected = path_logits(name, [*prefix, *path])
        deviation = mx.abs(logits[row] - expected).mean() / mx.std(expected)
        assert (deviation < MOST).item(), (row, deviation)


def grown(sequence: TreeSequence, seed: int) -> tuple[list[int], mx.array]:
    tree = tokens(len(TREE), seed)
    first = sequence.next_row
    return tree, sequence.evaluate(tree, [parent if parent < 0 else first + parent for parent in TREE])


@pytest.mark.parametrize("name", TREES)
def test_trees_give_the_logits_of_their_paths_beyond_the_window(name: str, monkeypatch: pytest.MonkeyPatch):
    """Also with dead slots among the others, after they were removed, and after a cut."""
    monkeypatch.setattr(tree_sequence, "_DEAD_SLOTS", 8)
    sequence, text = model(name).sequence(), tokens(CONTEXT, 1)
    for begin, end in ((0, 1), (1, 8), (8, CONTEXT)):
        sequence.prefill(text[begin:end])
    for round in range(3):
        first = sequence.next_row
        tree, logits = grown(sequence, round)
        assert_paths(name, logits, text, tree)
        sequence.keep([first, first + 1], [first + 3])
        text += [tree[0], tree[1]]
    sequence.truncate(WINDOW + 5)
    tree, logits = grown(sequence, 9)

    assert_paths(name, logits, text[: WINDOW + 5], tree)


@pytest.mark.parametrize("name", TREES)
def test_joint_forwards_give_the_same(name: str):
    if not model(name).joins:
        pytest.skip("it evaluates sequences in turns")
    sequences = [model(name).sequence() for _ in range(2)]
    texts = [tokens(CONTEXT, 3), tokens(WINDOW - 3, 4)]
    for sequence, text in zip(sequences, texts, strict=True):
        sequence.prefill(text)
    trees = [tokens(len(TREE), seed) for seed in (5, 6)]
    parts = [ForwardPart(sequence, tree, TREE) for sequence, tree in zip(sequences, trees, strict=True)]
    for logits, text, tree in zip(model(name).evaluate_together(parts), texts, trees, strict=True):
        assert_paths(name, logits, text, tree)


@pytest.mark.parametrize("name", sorted(REFUSED & set(modules())))
def test_the_others_are_refused_with_a_sentence(name: str):
    with pytest.raises(InputError, match=r"can't verify token trees \(.*\): choose"):
        LanguageModel(tiny(name), Path(name))
