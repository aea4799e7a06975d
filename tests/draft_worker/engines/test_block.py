"""Laws of the block drafters' engine: every candidate comes from the rows that its anchor's knowledge gives."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from draft_worker.candidates.block_candidates import RankedRows
from draft_worker.candidates.head_columns import Columns
from draft_worker.engine_interface import Batch
from draft_worker.engines.block import BlockEngine, BlockSequence, load
from draft_worker.worker import DraftWorker
from protocol.errors import InputError
from protocol.messages.base import NodeId, RequestId
from protocol.messages.features import FeatureForm
from protocol.messages.sampling import Sampling
from protocol.messages.worker import Start
from protocol.speculation.token_tree import Candidates
from protocol.worker.process import WorkerSetup
from tests.support.block_reference import BlockReference
from tests.support.models.tiny_models import VOCABULARY
from tests.support.models.trained_drafters import (
    BLOCK_KINDS,
    SHORT_HEAD,
    pack_as_speculators,
    random_features,
    write_target,
)

FEATURES = random_features(400, 64)
TEXT = [int(token) for token in np.random.default_rng(3).integers(0, VOCABULARY, 80)]
COUPLED = Sampling(temperature=0.0)
SAMPLINGS = {
    "greedy": COUPLED,
    "lukewarm": Sampling(temperature=0.7, seed=5),
    "warm": Sampling(temperature=1.0, seed=5),
    "penalties": Sampling(temperature=1.0, seed=5, frequency_penalty=1.5, top_k=20),
}


class Pair(NamedTuple):
    """An engine of a tiny drafter, and where its files are."""

    engine: BlockEngine
    drafter: Path
    target: Path


@pytest.fixture(scope="module")
def pairs(folders: dict[str, Path]) -> dict[str, Pair]:
    target = folders["target"]
    return {kind: Pair(BlockEngine.load(folders[kind], target), folders[kind], target) for kind in BLOCK_KINDS}


def opened(
    engine: BlockEngine, tokens: Sequence[int], fed: Sequence[int], sampling: Sampling = COUPLED
) -> BlockSequence:
    """A sequence of these committed tokens; those at the indices `fed` have features."""
    sequence = engine.open(sampling, VOCABULARY)
    sequence.prefill(tokens)
    for index in fed:
        sequence.feed(index, FEATURES[index : index + 1])
    return sequence


def chain(sequence: BlockSequence, path: Sequence[int]) -> list[Candidates]:
    """Candidates behind each token of a path below the committed prefix, in one growth step."""
    begin = sequence.next_row
    return sequence.evaluate(Batch([], path, [-1, *range(begin, begin + len(path) - 1)], 4))


def same(found: Candidates, expected: Candidates) -> bool:
    return found.tokens == expected.tokens and np.allclose(found.probabilities, expected.probabilities, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "sampling"),
    [*product(["z-lab", "vanilla", "DFlash2"], SAMPLINGS), *((kind, "warm") for kind in BLOCK_KINDS[1:])],
)
def test_candidates_are_those_of_the_reference(kind: str, sampling: str, pairs: dict[str, Pair]):
    (engine, drafter, target), path = pairs[kind], [5, 9, 4]
    reference = BlockReference(drafter, target)
    states = reference.rows([5], 12, FEATURES[:12].astype(np.float64), range(12))
    rows = min(len(path), len(states))
    start = Start(RequestId(1), 0, (*TEXT[:12], 5), NodeId(1), SAMPLINGS[sampling], vocabulary=VOCABULARY)
    processors = engine.processors(start)
    # Where processors may forbid the tokens that a selector chooses among, the others are candidates too.
    spread = processors is not None
    logits = [reference.logits(states, path[: row + 1], all_tokens=spread) for row in range(rows)]
    paths = [] if processors is None else [path[1 : row + 1] for row in range(rows)]
    batch = Batch([], path[:rows], [-1, 0, 1][:rows], 4, processors=processors, paths=paths)

    found = opened(engine, TEXT[:12], range(12), SAMPLINGS[sampling]).evaluate(batch)

    scores = mx.array(np.array(logits), mx.float32)
    expected = Columns(VOCABULARY, VOCABULARY).propose(scores, range(13, 13 + rows), SAMPLINGS[sampling], batch)
    assert all(same(*pair) for pair in zip(found, expected, strict=True))
    assert DraftWorker(engine, float).hello().block == len(states)


@pytest.mark.parametrize("sampling", ["greedy", "warm", "penalties"])
@pytest.mark.parametrize("kind", ["z-lab", "vanilla", "gated", "rnn"])
def test_a_short_head_s_candidates_are_those_of_the_whole_head_among_its_tokens(
    kind: str, sampling: str, pairs: dict[str, Pair], tmp_path: Path
):
    engine, drafter, target = pairs[kind]
    folder = Path(shutil.copytree(drafter, tmp_path / "short"))
    short = BlockEngine.load(pack_as_speculators(folder, target, SHORT_HEAD), target)
    start = Start(RequestId(1), 0, (*TEXT[:12], 5), NodeId(1), SAMPLINGS[sampling], vocabulary=VOCABULARY)
    batch = Batch([], [5, 9], [-1, 0], 4, processors=engine.processors(start), paths=[[], [9]])
    reference = BlockReference(drafter, target)
    states = reference.rows([5], 12, FEATURES[:12].astype(np.float64), range(12))
    logits = mx.array(np.array([reference.logits(states, [5, 9][: row + 1]) for row in range(2)]), mx.float32)

    found = opened(short, TEXT[:12], range(12), SAMPLINGS[sampling]).evaluate(batch)

    columns = Columns(VOCABULARY, VOCABULARY, SHORT_HEAD)
    expected = columns.propose(logits[:, mx.array(SHORT_HEAD)], [13, 14], SAMPLINGS[sampling], batch)
    assert all(same(*pair) for pair in zip(found, expected, strict=True))
    assert {token for each in found for token in each.tokens} <= set(SHORT_HEAD.tolist())


def test_a_node_that_its_anchors_block_reaches_needs_no_forward(pairs: dict[str, Pair]):
    sequence = opened(pairs["vanilla"].engine, TEXT[:12], range(12))
    chain(sequence, [1])
    assert sequence.forward_widths == (4,)

    sequence.evaluate(Batch([], [2, 3], [0, 0], 4))
    sequence.evaluate(Batch([], [4, 5], [1, 3], 4))
    assert sequence.forward_widths == ()

    sequence.evaluate(Batch([], [6, 7], [4, 2], 4))
    assert sequence.forward_widths == (4,)


@pytest.mark.parametrize("sampling", ["greedy", "lukewarm"])
def test_a_row_is_ranked_once_and_again_where_more_candidates_are_wanted(sampling: str, pairs: dict[str, Pair]):
    sequence = opened(pairs["z-lab"].engine, TEXT[:12], range(12), SAMPLINGS[sampling])
    with mock.patch("draft_worker.engines.block.RankedRows", wraps=RankedRows) as ranked:
        sequence.evaluate(Batch([], [5], [-1], 4))
        few = sequence.evaluate(Batch([], [9, 8], [0, 0], 4))
        assert ranked.call_count == 1
        many = sequence.evaluate(Batch([], [7], [0], 9))
        assert ranked.call_count == 2

    assert few[0] == few[1]
    assert (few[0].tokens, len(many[0].tokens)) == (many[0].tokens[:4], 9)


@dataclass
class Expected:
    """What the model of a sequence knows of a row: its anchor's knowledge, and the tokens from the anchor on."""

    before: list[int]
    fed: list[int]
    path: list[int]
    parent: int
    position: int


class Mirror:
    """A sequence beside a model of what each row knows."""

    def __init__(self, engine: BlockEngine) -> None:
        self.engine = engine
        self.form = engine.runner.form
        self.sequence: Any = engine.open(COUPLED, VOCABULARY)
        self.tokens: list[int] = []
        self.fed: list[int] = []
        self.rows: dict[int, Expected] = {}
        self.tip: Expected | None = None

    def prefill(self, count: int) -> None:
        if not self.rows:
            new = [(7 * len(self.tokens) + i) % VOCABULARY for i in range(count)]
            self.sequence.prefill(new)
            self.tokens += new
            self.tip = None

    def feed(self, gap: int, count: int) -> None:
        first = max(self.fed, default=-1) + 1 + gap
        count = min(count, len(self.tokens) - first)
        if count > 0:
            self.sequence.feed(first, FEATURES[first : first + count])
            self.fed += range(first, first + count)

    def read(self, most: int) -> None:
        self.sequence.read(most)

    def evaluate(self, nodes: Sequence[tuple[int, int]]) -> None:
        parents, begin = [], self.sequence.next_row
        for row, (token, choice) in enumerate(nodes, start=begin):
            parents.append([-1, *self.rows][choice % (len(self.rows) + 1)])
            self.rows[row] = self._expected(token, parents[-1])
        found = self.sequence.evaluate(Batch([], [token for token, _ in nodes], parents, 4))
        for row, candidates in enumerate(found, start=begin):
            each = self.rows[row]
            fresh = opened(self.engine, each.before, each.fed)
            assert same(candidates, chain(fresh, each.path)[-1])

    def keep(self, choice: int) -> None:
        if not self.rows:
            return
        row = [*self.rows][choice % len(self.rows)]
        path = [row]
        while self.rows[path[0]].parent in self.rows:
            path.insert(0, self.rows[path[0]].parent)
        below: set[int] = {row}
        for other, each in self.rows.items():
            if each.parent in below:
                below.add(other)
        self.sequence.keep(path, below - {row})
        self.tokens += [self.rows[each].path[-1] for each in path]
        self.tip = self.rows[row]
        self.rows = {each: self.rows[each] for each in sorted(below - {row})}

    def truncate(self, length: int) -> None:
        length = min(length, len(self.tokens))
        self.sequence.truncate(length)
        del self.tokens[length:]
        self.fed = [index for index in self.fed if index < length]
        self.rows, self.tip = {}, None

    def reopen(self, exclusive: bool) -> None:
        length = max(0, len(self.tokens) - 1)
        self.sequence = self.sequence.reopen(length, COUPLED, VOCABULARY, exclusive=exclusive)
        self.truncate(length)

    def check(self) -> None:
        assert self.sequence.committed == len(self.tokens)
        assert self.sequence.staleness == len(self.tokens) - max(self.fed, default=-1) - 1

    def _expected(self, token: int, parent: int) -> Expected:
        above = self.rows.get(parent)
        position = len(self.tokens) if above is None else above.position + 1
        known = position - max(self.fed, default=-1)
        if above is None and known > self.form.clean_prefix:
            above = self.tip
        if above is not None and len(above.path) < self.form.rows:
            return Expected(above.before, above.fed, [*above.path, token], parent, position)
        before: list[int] = []
        row = parent
        while row in self.rows:
            before.insert(0, self.rows[row].path[-1])
            row = self.rows[row].parent
        return Expected([*self.tokens, *before], list(self.fed), [token], parent, position)


_NODES = st.lists(st.tuples(st.integers(0, VOCABULARY - 1), st.integers(0, 30)), min_size=1, max_size=4)
_OPERATIONS = st.one_of(
    st.tuples(st.just("prefill"), st.integers(1, 5)),
    st.tuples(st.just("feed"), st.sampled_from([0, 0, 0, 1, 3]), st.integers(1, 6)),
    st.tuples(st.just("read"), st.integers(1, 4)),
    st.tuples(st.just("evaluate"), _NODES),
    st.tuples(st.just("evaluate"), _NODES),
    st.tuples(st.just("keep"), st.integers(0, 30)),
    st.tuples(st.just("truncate"), st.integers(0, 20)),
    st.tuples(st.just("reopen"), st.booleans()),
)

_FED_AFTER_KEEPING = [("feed", 0, 3), ("evaluate", [(1, 0)]), ("keep", 0), ("feed", 0, 1), ("evaluate", [(2, 0)])]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["z-lab", "z-lab with windows", "vanilla", "rnn", "DFlash2"])
@example(operations=_FED_AFTER_KEEPING)
@given(operations=st.lists(_OPERATIONS, max_size=20))
def test_any_history_gives_the_candidates_of_a_fresh_sequence_with_the_same_knowledge(
    kind: str, operations: list[tuple[Any, ...]], pairs: dict[str, Pair]
):
    mirror = Mirror(pairs[kind].engine)
    mirror.prefill(3)
    for name, *arguments in operations:
        getattr(mirror, name)(*arguments)
        mirror.check()


@pytest.mark.parametrize("kind", ["z-lab with windows", "rnn", "DFlash2", "DFlash2, scaled"])
def test_sequences_that_share_a_forward_get_what_each_gets_alone(kind: str, pairs: dict[str, Pair]):
    engine = pairs[kind].engine
    batches = [Batch([], [5, 9, 7], [-1, 0, -1], 4), Batch([TEXT[20]], [2], [-1], 4), Batch([], [1], [-1], 4)]
    begun = [(TEXT[:12], range(12), COUPLED), (TEXT[:20], range(2, 9), SAMPLINGS["warm"]), (TEXT[:3], [], COUPLED)]

    def evaluated(together: bool) -> list[list[Candidates]]:
        sequences = [opened(engine, *each) for each in begun]
        if together:
            return engine.evaluate_together(list(zip(sequences, batches, strict=True)))
        return [sequence.evaluate(batch) for sequence, batch in zip(sequences, batches, strict=True)]

    assert engine.joins([])
    joint, alone = evaluated(together=True), evaluated(together=False)
    for found, expected in zip(joint, alone, strict=True):
        assert all(same(*pair) for pair in zip(found, expected, strict=True))


def test_sequences_share_one_forward(pairs: dict[str, Pair]):
    engine = pairs["DFlash2"].engine
    sequences = [opened(engine, TEXT[:count], range(count)) for count in (12, 7)]
    with mock.patch.object(engine.runner, "forward", wraps=engine.runner.forward) as forward:
        engine.evaluate_together([(sequence, Batch([], [5, 6], [-1, -1], 4)) for sequence in sequences])

    assert [len(blocks) for _, blocks in forward.call_args.args[0]] == [2, 2]
    assert forward.call_count == 1


def test_guesses_by_prompt_lookup_are_mixed_with_those_of_a_selector(pairs: dict[str, Pair]):
    """A guess outside of the selector's choices counts as lookup says."""
    engine = pairs["DFlash2"].engine
    plain = opened(engine, TEXT[:12], range(12)).evaluate(Batch([], [5], [-1], 9))[0]
    outside = next(token for token in range(VOCABULARY) if token not in plain.tokens)
    followers = [[(outside, 0.5), (plain.tokens[2], 0.2)]]

    found = opened(engine, TEXT[:12], range(12)).evaluate(Batch([], [5], [-1], 20, followers=followers))[0]

    chances = dict(zip(found.tokens, found.probabilities, strict=True))
    expected = {token: 0.3 * chance for token, chance in zip(plain.tokens, plain.probabilities, strict=True)}
    expected[outside] = 0.5
    expected[plain.tokens[2]] += 0.2
    assert chances == pytest.approx(expected, abs=1e-4)


def test_a_copy_leaves_the_first_sequence_as_it_is(pairs: dict[str, Pair]):
    sequence = opened(pairs["vanilla"].engine, TEXT[:12], range(12))
    other = sequence.reopen(8, COUPLED, VOCABULARY, exclusive=False)
    other.prefill([1, 1, 1])
    other.feed(8, FEATURES[40:43])
    chain(other, [3])

    expected = chain(opened(pairs["vanilla"].engine, TEXT[:12], range(12)), [5])

    assert same(chain(sequence, [5])[0], expected[0])
    assert sequence.memory > 0


def test_the_engine_says_what_it_reads_and_knows(pairs: dict[str, Pair]):
    engine = pairs["vanilla"].engine

    assert engine.features == FeatureForm((0, 1), 32)
    assert (engine.name, engine.architecture, engine.vocabulary, engine.context) == ("block", "dspark", VOCABULARY, 512)
    assert pairs["z-lab"].engine.architecture == "dflash"


def test_a_drafter_finds_its_own_target_by_the_setup(pairs: dict[str, Pair], tmp_path: Path):
    write_target(tmp_path / "other", vocab_size=70)

    def loaded(target: Path | str) -> BlockEngine:
        drafter = str(pairs["z-lab"].drafter)
        return load(WorkerSetup(address="", epoch=1, incarnation=1, engine="block", model=drafter, target=str(target)))

    assert loaded(pairs["z-lab"].target).tokenizer == pairs["z-lab"].engine.tokenizer
    with pytest.raises(InputError, match=r"uses the embedding and the head of its target: name a target\.$"):
        loaded("")
    with pytest.raises(InputError, match=r"67 tokens, but .* has 32 and 70: choose the draft's own target\.$"):
        loaded(tmp_path / "other")
