"""After any writes, drops, copies, exports and adoptions, a layer cache gives the results of a new one."""

import gc
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from mlx_lm.models.cache import KVCache

from protocol.inference import tree_sequence
from protocol.inference.language_model import LanguageModel
from protocol.inference.layer_caches import IMPLEMENTATIONS, full_attention
from protocol.inference.layer_caches.full_attention import FullAttentionCache
from protocol.inference.tree_sequence import TreeSequence
from tests.support.models.architecture_sizes import WINDOW
from tests.support.models.architectures import tiny
from tests.support.models.tiny_models import VOCABULARY, alike, network, stock_logits, tree_model

TOKENS = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=12)
MOST_SEQUENCES = 3
PHASES = (Phase.generate, Phase.shrink)


KINDS = {
    "full attention": "llama",
    "windows": "gemma3_text",
    "latent": "deepseek_v3",
    "several caches": "falcon_h1",
    "delta rule": "qwen3_next",
    "state space": "granitemoehybrid",
    "linear attention": "bailing_hybrid",
    "convolution": "lfm2",
    "states replaced": "rwkv7",
    "own positions": "gpt_bigcode",
    "cache as it is": "deepseek_v41",
}
"""By what their layers hold: an architecture."""


@cache
def model(name: str = "") -> LanguageModel:
    return LanguageModel(tiny(name)) if name else tree_model(max_position_embeddings=4096)


class Sequences(RuleBasedStateMachine):
    """Sequences beside their committed tokens. Slots are moved as soon as three of them are dead."""

    architecture = ""

    @property
    def model(self) -> LanguageModel:
        return model(self.architecture)

    @initialize(prompt=TOKENS)
    def begin(self, prompt: list[int]) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(tree_sequence, "_DEAD_SLOTS", 3)
        self.patch.setattr(tree_sequence, "_SPARE_ROWS", 2)
        self.patch.setattr(full_attention, "ROWS_TOGETHER", 4)
        self.patch.setattr(tree_sequence, "_MASK_COSTS", 6)
        self.all: list[tuple[TreeSequence, list[int]]] = []
        self.add(self.model.sequence(), [])
        self.write(0, prompt)

    def teardown(self) -> None:
        self.patch.undo()

    @rule(which=st.integers(0), tokens=TOKENS, remembers=st.booleans())
    def write(self, which: int, tokens: list[int], remembers: bool = True) -> None:
        sequence, committed = self.of(which)
        sequence.prefill(tokens)
        committed += tokens
        if remembers:
            sequence.remember(len(committed))

    @rule(which=st.integers(0), tokens=TOKENS, choices=st.lists(st.integers(0), min_size=12, max_size=12))
    def keep(self, which: int, tokens: list[int], choices: list[int]) -> None:
        """Evaluate a tree; commit the path to one of its rows."""
        sequence, committed = self.of(which)
        first = sequence.next_row
        chain = self.model.level == "chain"
        parents = [index if chain else choice % (index + 1) for index, choice in enumerate(choices[: len(tokens)])]
        parents = [first - 1 + parent for parent in parents]
        parents = [-1 if parent < first else parent for parent in parents]
        sequence.evaluate(tokens, parents)
        path = [first + choices[0] % len(tokens)]
        while (parent := parents[path[0] - first]) >= 0:
            path.insert(0, parent)
        sequence.keep(path, ())
        committed += [tokens[row - first] for row in path]

    @rule(which=st.integers(0))
    def shed(self, which: int) -> None:
        self.of(which)[0].shed()

    @rule(which=st.integers(0), cut=st.integers(0, 60))
    def truncate(self, which: int, cut: int) -> None:
        sequence, committed = self.of(which)
        length = max(min(1, len(committed)), len(committed) - cut)
        reach = sequence.reach(length)
        sequence.truncate(length)
        assert sequence.committed == reach <= length
        del committed[reach:]

    @rule(which=st.integers(0), length=st.integers(1, 100))
    def copy(self, which: int, length: int) -> None:
        sequence, committed = self.of(which)
        length = min(length, len(committed))
        self.add(sequence.copy(length), committed[: sequence.reach(length)])

    @rule(which=st.integers(0))
    def forget(self, which: int) -> None:
        """What lies behind windows."""
        sequence, _ = self.of(which)
        sequence.forget(sequence.committed)

    @rule(which=st.integers(0), length=st.integers(1, 100))
    def adopt(self, which: int, length: int) -> None:
        sequence, committed = self.of(which)
        length, layout = min(length, len(committed)), self.model.layout
        if layout is None or not length or sequence.forgotten:
            return
        keys, values = sequence.export(0, length)
        adopting = self.model.sequence()
        adopting.adopt(keys, values, length, layout.dtype)
        self.add(adopting, committed[:length])

    @invariant()
    def every_sequence_gives_the_logits_of_a_new_one(self) -> None:
        for sequence, committed in self.all:
            assert sequence.committed == len(committed)
            assert self.answers(sequence, committed)

    def answers(self, sequence: TreeSequence, committed: Sequence[int]) -> bool:
        """Whether the logits behind one more token are those of mlx-lm alone. The sequence does not change."""
        logits = sequence.evaluate((8,), (-1,))[0]
        sequence.keep((), ())
        return alike(logits, stock_logits(self.model.network, [*committed, 8]))

    def of(self, which: int) -> tuple[TreeSequence, list[int]]:
        return self.all[which % len(self.all)]

    def add(self, sequence: TreeSequence, committed: list[int]) -> None:
        self.all = [*self.all, (sequence, committed)][-MOST_SEQUENCES:]


TestSequences = Sequences.TestCase
TestSequences.settings = settings(max_examples=15, stateful_step_count=15, derandomize=True)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_cache_gives_the_results_of_a_new_one(kind: str):
    machine = type(f"Sequences of {kind}", (Sequences,), {"architecture": KINDS[kind]})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=4, stateful_step_count=8, derandomize=True, phases=PHASES)
    )


def test_memory_is_that_of_the_arrays():
    empty, sequence = model().sequence(), model().sequence()
    sequence.prefill((1, 2, 3))

    assert empty.memory == 0
    assert sequence.memory == sum(array.nbytes for cache in sequence.caches for array in cache.arrays) > 0


def test_a_sequence_holds_no_more_than_it_counts():
    """The states that its last forward was given and made are not held beside those behind it."""
    made = LanguageModel(tiny(KINDS["delta rule"], linear_key_head_dim=64, linear_value_head_dim=64))
    _ended(made)
    before = _held()
    sequences = [_ended(made) for _ in range(4)]

    assert 0 < _held() - before < 1.1 * sum(sequence.memory for sequence in sequences)


def _ended(made: LanguageModel) -> TreeSequence:
    """Behind a prompt and four forwards, of which some rows were kept."""
    sequence = made.sequence()
    sequence.prefill([3, 4, 5] * 6)
    for rows, taken in ((3, 2), (3, 1), (3, 3), (1, 1)):
        first = sequence.next_row
        mx.eval(sequence.evaluate(range(4, 4 + rows), [-1, first, first + 1][:rows]))
        sequence.keep(range(first, first + taken), ())
    mx.eval([array for cache in sequence.caches for array in cache.arrays])
    return sequence


def _held() -> int:
    """Bytes of all arrays."""
    gc.collect()
    return mx.get_active_memory()


class _Unregistered(KVCache):
    """A subclass that the project does not know."""


class _Stock(KVCache):
    pass


class _Counting(FullAttentionCache):
    writes = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.writes += 1
        return super().update_and_fetch(keys, values)


def _network_with(stock: type[KVCache]) -> Any:
    made = network()
    made.make_cache = lambda: [stock() for _ in made.layers]
    return made


def test_an_unregistered_cache_class_is_used_as_it_is():
    made = LanguageModel(_network_with(_Unregistered))

    assert (made.level, made.level_reason) == ("chain", "its _Unregistered is used as it is")


def test_a_registered_cache_serves_the_models_that_ask_for_its_class(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(IMPLEMENTATIONS, _Stock, _Counting)
    made = LanguageModel(_network_with(_Stock))
    sequence = made.sequence()
    sequence.prefill((1, 2, 3))
    sequence.evaluate((4, 5), (-1, -1))

    assert [cache.writes for cache in sequence.caches if isinstance(cache, _Counting)] == [2, 2]


def test_rows_far_behind_a_window_are_let_go_and_the_rest_moves(monkeypatch: pytest.MonkeyPatch):
    """Trees with dead slots before and behind the first row that is held."""
    monkeypatch.setattr(tree_sequence, "_DEAD_SLOTS", 6)
    monkeypatch.setattr(tree_sequence, "_SPARE_ROWS", 3)
    monkeypatch.setattr(full_attention, "_GROWTH", 1)
    made = model("gemma3_text")
    sequence, text, numbers = made.sequence(), [1, 2, 3], random.Random(4)
    sequence.prefill(text)
    for _ in range(40):
        first, tree = sequence.next_row, [numbers.randrange(60) for _ in range(4)]
        logits = sequence.evaluate(tree, (-1, first, first, first + 2))
        expected = stock_logits(made.network, [*text, tree[0], tree[2], tree[3]])
        assert alike(logits[3], expected)
        sequence.keep([first, first + 2], ())
        text += [tree[0], tree[2]]
        sequence.forget(len(text) - 1)

    assert len(text) - WINDOW - 6 <= sequence.forgotten <= len(text) - WINDOW - 3
    assert sequence.reach(len(text) - 3) == len(text) - 3
    assert sequence.reach(len(text) - 30) == 0
    held = {
        cache.arrays[0].shape[2] for cache in sequence.caches if isinstance(cache, FullAttentionCache) and cache.window
    }
    assert max(held) < WINDOW + 24 < len(text)
    for shorter in (len(text) - 3, 20):
        sequence.truncate(shorter)
        text = text[: sequence.committed]
        logits = sequence.evaluate((7,), (-1,))
        assert alike(logits[0], stock_logits(made.network, [*text, 7]))
    assert not text


def test_a_remembered_place_outlives_the_rows_behind_a_window(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tree_sequence, "_SPARE_ROWS", 3)
    monkeypatch.setattr(full_attention, "ROWS_TOGETHER", 4)
    made, text = model("gemma3_text"), [3 + place % 50 for place in range(90)]
    sequence = made.sequence()
    for begin in range(0, 90, 15):
        sequence.prefill(text[begin : begin + 15])
        if begin in (0, 30):
            sequence.remember(begin + 12)
        sequence.forget(sequence.committed)
    other = sequence.copy(50)

    assert (sequence.reach(89), sequence.reach(50), sequence.reach(20)) == (89, 42, 12)
    for each in (other, sequence):
        each.truncate(min(50, each.committed))
        logits = each.evaluate((7,), (-1,))
        assert alike(logits[0], stock_logits(made.network, [*text[:42], 7]))
    memory = sequence.memory
    assert sequence.shed()
    assert sequence.memory < memory
    assert sequence.reach(20) == 0
