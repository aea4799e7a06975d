"""Every architecture of the installed mlx-lm reaches its level, and gives there the logits of its tokens one by one."""

import random
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import CacheList, make_prompt_cache

from protocol.inference import tree_sequence
from protocol.inference.joint_forward import ForwardPart
from protocol.inference.language_model import LanguageModel
from protocol.inference.tree_sequence import TreeSequence
from protocol.messages.base import Level
from tests.support.models.architecture_sizes import VOCABULARY, WINDOW
from tests.support.models.architectures import IMPOSSIBLE, UNSTABLE, modules, tiny
from tests.support.models.tiny_models import ELEMENT, alike

CHAINS = {
    *("baichuan_m1", "jamba", "longcat_flash_ngram", "mamba", "recurrent_gemma", "rwkv7"),
    *("afm7", "gpt2", "gpt_bigcode", "llama4", "minimax_m3_vl", "nanochat", "talkie"),
    "deepseek_v41",
}
"""Of layers that fold tokens in a way of their own, that compute with positions, and a cache that is used as it is."""
PLAIN = {"phi3small"}
"""It sees later tokens in prefill: a boolean mask is added to its scores."""
NARROWER_WHEN_DECODING = {"plamo3"}
"""mlx-lm masks its prompts with a window that is wider by one than the cache's."""
TREES = sorted(set(modules()) - CHAINS - PLAIN - set(IMPOSSIBLE))
CONTEXT = 3 * WINDOW + 2
TREE = (-1, 0, 0, 1, -1, 3, 4)


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


def paths(tree: Sequence[int]) -> Iterator[list[int]]:
    """The tokens from the root to each token of TREE."""
    known: list[list[int]] = []
    for parent, token in zip(TREE, tree, strict=True):
        known.append([*([] if parent < 0 else known[parent]), token])
        yield known[-1]


def assert_paths(name: str, logits: mx.array, prefix: Sequence[int], tree: Sequence[int]) -> None:
    """`logits` are those of TREE behind the prefix."""
    for row, path in enumerate(paths(tree)):
        assert alike(logits[row], path_logits(name, [*prefix, *path])), row


def grown(sequence: TreeSequence, seed: int) -> tuple[list[int], mx.array]:
    tree = tokens(len(TREE), seed)
    first = sequence.next_row
    return tree, sequence.evaluate(tree, [parent if parent < 0 else first + parent for parent in TREE])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", TREES)
def test_trees_give_the_logits_of_their_paths_beyond_the_window(name: str, monkeypatch: pytest.MonkeyPatch):
    """Also with dead slots among the others, after they were removed, and after a cut."""
    monkeypatch.setattr(tree_sequence, "_DEAD_SLOTS", 8)
    sequence, text = model(name).sequence(), tokens(CONTEXT, 1)
    for begin, end in ((0, 1), (1, 8), (8, CONTEXT)):
        sequence.prefill(text[begin:end])
    sequence = sequence.copy(CONTEXT)
    for round in range(3):
        first = sequence.next_row
        tree, logits = grown(sequence, round)
        assert_paths(name, logits, text, tree)
        sequence.keep([first, first + 1], [first + 3])
        text += [tree[0], tree[1]]
    sequence.truncate(WINDOW + 5)
    tree, logits = grown(sequence, 9)

    assert_paths(name, logits, text[: sequence.committed], tree)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", TREES)
def test_joint_forwards_give_the_same(name: str):
    if not model(name).joins:
        pytest.skip("it evaluates sequences in turns")
    for logits, text, tree in joint(model(name)):
        assert_paths(name, logits, text, tree)


def joint(made: LanguageModel) -> Iterator[tuple[mx.array, list[int], list[int]]]:
    """Logits of TREE behind two texts in one forward, the text, and the tree's tokens."""
    texts, trees = [tokens(CONTEXT, 3), tokens(WINDOW - 3, 4)], [tokens(len(TREE), seed) for seed in (5, 6)]
    sequences = [made.sequence() for _ in texts]
    for sequence, text in zip(sequences, texts, strict=True):
        sequence.prefill(text)
    parts = [ForwardPart(sequence, tree, TREE) for sequence, tree in zip(sequences, trees, strict=True)]
    return zip(made.evaluate_together(parts), texts, trees, strict=True)


LEVELS: dict[str, Level] = {
    **dict.fromkeys(TREES, "tree"),
    **dict.fromkeys(CHAINS, "chain"),
    **dict.fromkeys(PLAIN, "plain"),
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", sorted(LEVELS))
def test_the_level_is_found_and_a_lower_one_has_a_reason(name: str):
    found = model(name)

    assert found.level == LEVELS[name]
    assert bool(found.level_reason) == (found.level != "tree")


@pytest.mark.thorough
@pytest.mark.parametrize("name", sorted(CHAINS | PLAIN))
@pytest.mark.parametrize("remembered", [True, False])
def test_a_path_that_is_kept_in_part_gives_the_logits_of_its_tokens_one_by_one(name: str, remembered: bool):
    """Also from a copy, and after a cut to a token that no state is remembered of."""
    sequence, text, numbers = model(name).sequence(), tokens(CONTEXT, 1), random.Random(7)
    for begin, end in [(0, 1), (1, 8), (8, CONTEXT)] if name not in PLAIN else [(i, i + 1) for i in range(CONTEXT)]:
        sequence.prefill(text[begin:end])
    for round in range(4):
        rows = [sequence.next_row + row for row in range(1 if name in PLAIN else 5)]
        path = tokens(len(rows), round)
        assert_chain(name, sequence.evaluate(path, [-1, *rows[:-1]]), text, path)
        kept = numbers.randrange(len(rows) + 1)
        sequence.keep(rows[:kept], ())
        text += path[:kept]
    if remembered:
        sequence = sequence.copy(sequence.committed)
    else:
        sequence.truncate(WINDOW + 5)
        assert sequence.committed <= WINDOW + 5
        text = text[: sequence.committed]
    path = tokens(1 if name in PLAIN else 3, 9)
    parents = [-1, *range(sequence.next_row, sequence.next_row + len(path) - 1)]

    assert_chain(name, sequence.evaluate(path, parents), text, path)


def assert_chain(name: str, logits: mx.array, prefix: Sequence[int], path: Sequence[int]) -> None:
    stock, expected = make_prompt_cache(model(name).network), []
    for token in (*prefix, *path):
        expected.append(model(name).network(mx.array([[token]]), cache=stock)[0, -1])
    for row, one in zip(logits, expected[len(prefix) :], strict=True):
        assert alike(row, one)


_CHUNKED_IN_GATE = {"gemma3_text", "qwen3_next", "granitemoehybrid", "lfm2", "llama4", "rwkv7", "phi3"}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("length", "chunk"), [(CONTEXT, 1), (500, 7)])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in _CHUNKED_IN_GATE else pytest.mark.slow)
        for name in sorted(set(LEVELS) - set(UNSTABLE) - NARROWER_WHEN_DECODING)
    ],
)
def test_prefill_in_chunks_leaves_the_same_logits_behind(name: str, length: int, chunk: int):
    """As one chunk of up to 512 does. Learned positions end at 1,024."""
    text = tokens(length, 11)
    small, large = (_prefilled(name, text, size) for size in (chunk, 512))
    assert alike(small, large)


def _prefilled(name: str, text: Sequence[int], chunk: int) -> mx.array:
    """Logits of one more token."""
    sequence = model(name).sequence()
    for begin in range(0, len(text), chunk):
        sequence.prefill(text[begin : begin + chunk])
    logits = sequence.evaluate([3], [-1])[0]
    mx.eval(logits)
    return logits


_PROMPT = np.random.default_rng(seed=5).integers(0, VOCABULARY, 3 * WINDOW)
_RUNNABLE = sorted(set(modules()) - set(IMPOSSIBLE))


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", _RUNNABLE)
def test_a_module_has_a_tiny_model_whose_logits_depend_on_the_first_of_three_windows(name: str):
    other = _PROMPT.copy()
    other[0] = (other[0] + 7) % VOCABULARY
    try:
        logits, after_another = (_logits(name, prompt) for prompt in (_PROMPT, other))
    except Exception as error:
        error.add_note(f"mlx_lm/models/{name}.py needs a recipe in tests/support/models/architecture_sizes.py, or a")
        error.add_note("reason in IMPOSSIBLE of tests/support/models/architectures.py if no processor can run it.")
        raise

    possible = np.isfinite(logits)  # a model may never give some ids
    assert not np.isnan(logits).any()
    assert 0.5 < logits[possible].std() < 3
    assert np.abs(logits - after_another)[-1][possible[-1]].mean() > 1e-3 * logits[possible].std()


def _logits(name: str, prompt: np.ndarray) -> np.ndarray:
    """(tokens, V): of the ids that a prompt here can have."""
    stock = _model(name)
    logits = stock(mx.array(prompt[None]), cache=make_prompt_cache(stock))[0, :, :VOCABULARY]
    assert logits.dtype == ELEMENT
    return np.array(logits.astype(mx.float32))


@pytest.mark.thorough
def test_every_window_is_one_that_three_windows_of_text_leave_behind():
    windows = {(name, window) for name in _RUNNABLE for window in _windows(make_prompt_cache(_model(name)))}

    assert {window for _, window in windows} == {WINDOW}
    assert {name for name, _ in windows} >= {"gemma3", "gemma4", "gpt_oss", "llama4", "baichuan_m1", "recurrent_gemma"}


@pytest.mark.thorough
def test_no_module_makes_a_kind_of_cache_that_nobody_has_looked_at():
    kinds = {type(layer) for name in _RUNNABLE for layer in make_prompt_cache(_model(name))}

    assert {kind.__name__ for kind in kinds} == {
        "KVCache",
        "RotatingKVCache",
        "ChunkedKVCache",
        "ArraysCache",
        "CacheList",
        "LayerCache",
    }


@pytest.mark.skipif(mx.metal.is_available(), reason="only Metal runs them")
@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_an_impossible_module_cannot_run_here(name: str):
    model = tiny(name)

    with pytest.raises(RuntimeError, match="No Metal back-end"):
        mx.eval(model(mx.array([[1, 2, 3]]), cache=make_prompt_cache(model)))


@cache
def _model(name: str) -> Any:
    return tiny(name)


def _windows(caches: list[Any]) -> Iterator[int]:
    """The windows and chunks that the caches of a model state."""
    for layer in caches:
        if isinstance(layer, CacheList):
            yield from _windows(list(layer.caches))
        for attribute in ("max_size", "chunk_size", "window_size"):
            if (window := getattr(layer, attribute, None)) is not None:
                yield window
