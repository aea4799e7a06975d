"""Laws of ReDrafter's engine: every candidate comes from the last known feature and the tokens behind it."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import load_file

from draft_worker.candidates.columns import Columns
from draft_worker.engine import Batch
from draft_worker.engines.redrafter import ReDrafterEngine, ReDrafterSequence, load
from protocol.errors import InputError
from protocol.messages.features import FINAL, FeatureForm
from protocol.messages.sampling import Sampling
from protocol.speculation.candidates import Candidates
from protocol.worker.process import WorkerSetup
from tests.support.models.tiny_models import VOCABULARY
from tests.support.models.trained_drafters import (
    SHORT_HEAD,
    WIDTH,
    random_features,
    shorten,
    write_redrafter_folder,
    write_target,
)

FEATURES = random_features(400, WIDTH)
TEXT = [int(token) for token in np.random.default_rng(3).integers(0, VOCABULARY, 80)]
GREEDY = Sampling()
SAMPLINGS = {
    "greedy": GREEDY,
    "warm": Sampling(temperature=0.7, seed=5),
    "rejection": Sampling(temperature=1.0, seed=5, verification="rejection"),
}
KINDS: dict[str, dict[str, Any]] = {
    "published": {},
    "projected": {"exit": 40},
    "sums": {"recurrent": False, "blocks": 1},
}


class Pair(NamedTuple):
    engine: ReDrafterEngine
    drafter: Path
    target: Path


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    root = tmp_path_factory.mktemp("redrafters")
    write_target(root / "target")
    for kind, changes in KINDS.items():
        write_redrafter_folder(root / kind, **changes)
    return {
        kind: Pair(ReDrafterEngine.load(root / kind, root / "target"), root / kind, root / "target") for kind in KINDS
    }


def reference(pair: Pair, feature: NDArray[np.float32], tokens: Sequence[int]) -> NDArray[np.float64]:
    """(V,) logits behind `tokens`, which follow the token of `feature`, from the files alone."""
    config = json.loads((pair.drafter / "config.json").read_text())
    tensors = {name: each.astype(np.float64) for name, each in load_file(pair.drafter / "model.safetensors").items()}
    embedding = load_file(pair.target / "model.safetensors")["model.embed_tokens.weight"].astype(np.float64)
    state = np.zeros(config["hidden_size"])
    for token in tokens:
        if config["rnn"]:
            mixed = tensors["rnn_w.weight"] @ embedding[token] + tensors["rnn_u.weight"] @ state
            state = silu(mixed + tensors["rnn_u.bias"])
        else:
            state = state + embedding[token]
    x = np.concatenate([feature.astype(np.float64), state])
    if "input_proj.weight" in tensors:
        x = tensors["input_proj.weight"] @ x + tensors["input_proj.bias"]
    for block in range(config["num_draft_layers"]):
        x = x + silu(tensors[f"lm_head.{block}.linear.weight"] @ x + tensors[f"lm_head.{block}.linear.bias"])
    return tensors[f"lm_head.{config['num_draft_layers']}.weight"] @ x


def silu(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return x / (1 + np.exp(-x))


def opened(engine: ReDrafterEngine, tokens: Sequence[int], fed: int, sampling: Sampling = GREEDY) -> ReDrafterSequence:
    sequence = engine.open(sampling, VOCABULARY)
    sequence.prefill(tokens)
    if fed:
        sequence.feed(0, FEATURES[:fed])
    return sequence


def chain(sequence: Any, path: Sequence[int]) -> list[Candidates]:
    begin = sequence.next_row
    return sequence.evaluate(Batch([], path, [-1, *range(begin, begin + len(path) - 1)], 4))


def same(found: Candidates, expected: Candidates) -> bool:
    return found.tokens == expected.tokens and np.allclose(found.probabilities, expected.probabilities, atol=1e-4)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fed", [12, 9])
def test_candidates_are_those_of_the_reference(kind: str, sampling: str, fed: int, pairs: dict[str, Pair]):
    pair, path = pairs[kind], [5, 9, 4]
    known = [*TEXT[fed:12], *path]
    each = [known[: len(known) - 2 + row] for row in range(3)]
    logits = mx.array(np.array([reference(pair, FEATURES[fed - 1], tokens) for tokens in each]), mx.float32)

    found = chain(opened(pair.engine, TEXT[:12], fed, SAMPLINGS[sampling]), path)

    batch = Batch([], path, [-1, 0, 1], 4)
    expected = Columns(VOCABULARY, VOCABULARY).propose(logits, range(13, 16), SAMPLINGS[sampling], batch)
    assert all(same(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_short_head_s_candidates_are_those_of_the_whole_head_among_its_tokens(
    sampling: str, pairs: dict[str, Pair], tmp_path: Path
):
    pair, path = pairs["published"], [5, 9]
    shutil.copytree(pair.drafter, tmp_path / "short")
    short = ReDrafterEngine.load(shorten(tmp_path / "short"), pair.target)
    logits = np.array([reference(pair, FEATURES[11], path[: row + 1]) for row in range(2)])[:, SHORT_HEAD]

    found = chain(opened(short, TEXT[:12], 12, SAMPLINGS[sampling]), path)

    columns, batch = Columns(VOCABULARY, VOCABULARY, SHORT_HEAD), Batch([], path, [-1, 0], 4)
    expected = columns.propose(mx.array(logits, mx.float32), [13, 14], SAMPLINGS[sampling], batch)
    assert all(same(*pair) for pair in zip(found, expected, strict=True))


_NODES = st.lists(st.tuples(st.integers(0, VOCABULARY - 1), st.integers(0, 30)), min_size=1, max_size=4)
_OPERATIONS = st.one_of(
    st.tuples(st.just("feed"), st.sampled_from([0, 0, 1]), st.integers(1, 6)),
    st.tuples(st.just("evaluate"), _NODES),
    st.tuples(st.just("keep"), st.integers(0, 30)),
    st.tuples(st.just("truncate"), st.integers(0, 20)),
    st.tuples(st.just("reopen"), st.booleans()),
)


class Mirror:
    """A sequence beside a model of what each row knows: the tokens and features when its path began, and that path."""

    def __init__(self, engine: ReDrafterEngine) -> None:
        self.engine = engine
        self.sequence = opened(engine, TEXT[:6], 0)
        self.tokens = TEXT[:6]
        self.fed: list[int] = []
        self.rows: dict[int, tuple[list[int], list[int], list[int], int]] = {}

    def feed(self, gap: int, count: int) -> None:
        first = max(self.fed, default=-1) + 1 + gap
        count = min(count, len(self.tokens) - first)
        if count > 0:
            self.sequence.feed(first, FEATURES[first : first + count])
            self.fed = [*(self.fed if not gap else []), *range(first, first + count)]

    def evaluate(self, nodes: Sequence[tuple[int, int]]) -> None:
        parents, begin = [], self.sequence.next_row
        for row, (token, choice) in enumerate(nodes, start=begin):
            parent = [-1, *self.rows][choice % (len(self.rows) + 1)]
            before, fed, path, _ = self.rows.get(parent, (list(self.tokens), list(self.fed), [], -1))
            self.rows[row] = (before, fed, [*path, token], parent)
            parents.append(parent)
        found = self.sequence.evaluate(Batch([], [token for token, _ in nodes], parents, 4))
        for row, candidates in enumerate(found, start=begin):
            before, fed, path, _ = self.rows[row]
            fresh = opened(self.engine, before, 0)
            for index in fed:
                fresh.feed(index, FEATURES[index : index + 1])
            assert same(candidates, chain(fresh, path)[-1])

    def keep(self, choice: int) -> None:
        if not self.rows:
            return
        row = [*self.rows][choice % len(self.rows)]
        path = [row]
        while self.rows[path[0]][3] in self.rows:
            path.insert(0, self.rows[path[0]][3])
        below = {row}
        for other, each in self.rows.items():
            if each[3] in below:
                below.add(other)
        self.sequence.keep(path, below - {row})
        self.tokens = self.tokens + [self.rows[each][2][-1] for each in path]
        self.rows = {each: self.rows[each] for each in sorted(below - {row})}

    def truncate(self, length: int) -> None:
        length = min(length, len(self.tokens))
        self.sequence.truncate(length)
        self.tokens = self.tokens[:length]
        self.fed = [index for index in self.fed if index < length]
        self.rows = {}

    def reopen(self, exclusive: bool) -> None:
        length = max(0, len(self.tokens) - 1)
        self.sequence = self.sequence.reopen(length, GREEDY, VOCABULARY, exclusive=exclusive)
        self.truncate(length)


@given(operations=st.lists(_OPERATIONS, max_size=20))
def test_any_history_gives_the_candidates_of_a_fresh_sequence_with_the_same_knowledge(
    operations: list[tuple[Any, ...]], pairs: dict[str, Pair]
):
    mirror = Mirror(pairs["published"].engine)
    for name, *arguments in operations:
        getattr(mirror, name)(*arguments)
        assert mirror.sequence.committed == len(mirror.tokens)
        assert mirror.sequence.staleness == len(mirror.tokens) - max(mirror.fed, default=-1) - 1


def test_features_of_the_last_tokens_alone_are_kept(pairs: dict[str, Pair]):
    engine = pairs["published"].engine
    sequence = opened(engine, TEXT * 4, 300)

    assert sequence.memory == 256 * WIDTH * 4
    sequence.truncate(10)
    assert (sequence.staleness, sequence.memory) == (10, 0)
    sequence.feed(0, FEATURES[:10])
    assert same(chain(sequence, [5])[0], chain(opened(engine, TEXT[:10], 10), [5])[0])


def test_candidates_stay_finite_whatever_was_fed(pairs: dict[str, Pair]):
    for absurd in (np.nan, np.inf, -3e38):
        sequence = opened(pairs["published"].engine, TEXT[:12], 0)
        sequence.feed(0, np.full((12, WIDTH), absurd, np.float32))
        for found in chain(sequence, [5, 9, 4]):
            assert len(found.tokens) >= 1
            assert np.isfinite(found.probabilities).all()


def test_the_engine_says_what_it_reads(pairs: dict[str, Pair]):
    engine = pairs["published"].engine

    assert engine.features == FeatureForm((FINAL,), WIDTH)
    assert (engine.name, engine.vocabulary) == ("redrafter", VOCABULARY)


def test_a_target_of_another_width_is_refused(pairs: dict[str, Pair], tmp_path: Path):
    write_target(tmp_path / "other", hidden_size=16)
    setup = WorkerSetup(address="", epoch=1, incarnation=1, engine="redrafter", model=str(pairs["published"].drafter))

    with pytest.raises(InputError, match=r"uses the embedding and the head of its target: name a target\.$"):
        load(setup)
    with pytest.raises(InputError, match=r"states of 32 numbers and 67 tokens, but .* has 16 and 67: choose"):
        ReDrafterEngine.load(pairs["published"].drafter, tmp_path / "other")
