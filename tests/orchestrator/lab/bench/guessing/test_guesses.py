"""Guesses of a draft along a text: which features it knows by then, and which guesses count."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from draft_worker.engine import Batch, EngineSequence
from draft_worker.engines.eagle3 import load
from orchestrator.lab.bench.acceptance import TargetText
from orchestrator.lab.bench.guessing import STRIDE, hits, rates, seconds_per_guess
from protocol.contracts.training import DEPTHS
from protocol.messages.sampling import Sampling
from protocol.speculation.candidates import Candidates
from tests.support.models.drafter_packages import setup, write_drafter
from tests.support.models.tiny_models import VOCABULARY
from tests.support.models.trained_drafters import write_target

PROMPT, ANSWER = 10, 19
TEXT = TargetText(tokens=tuple(range(100, 100 + PROMPT + ANSWER)), prompt=PROMPT, temperature=0.7, seed=3)
FEATURES = np.arange(PROMPT + ANSWER, dtype=np.float32)[:, None]


class Counting:
    """An engine that guesses the next number; its guess is wrong where the root's distance to known features is odd."""

    features = object()

    def __init__(self) -> None:
        self.sampling: Sampling | None = None
        self.roots: list[tuple[int, int]] = []
        """For each first node: its index, and how many features were known."""

    def open(self, sampling: Sampling, vocabulary: int) -> Any:
        self.sampling = sampling
        return CountingSequence(self)


class CountingSequence(EngineSequence):
    def __init__(self, engine: Counting) -> None:
        self._engine = engine
        self.tokens: list[int] = []
        self.known = 0
        self.rows: dict[int, int] = {}
        self.next = 0

    @property
    def committed(self) -> int:
        return len(self.tokens)

    @property
    def next_row(self) -> int:
        return self.next

    def prefill(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens

    def feed(self, first: int, rows: NDArray[np.float32]) -> None:
        assert rows[:, 0].tolist() == list(range(first, first + len(rows)))
        assert self.known == first
        self.known = first + len(rows)
        assert self.known <= self.committed

    def evaluate(self, batch: Batch) -> list[Candidates]:
        assert tuple(self.tokens) == TEXT.tokens[: self.committed]
        if batch.parents[0] == -1:
            self._engine.roots.append((self.committed, self.known))
        for token in batch.tokens:
            self.rows[self.next] = token
            self.next += 1
        off = (self.committed - self.known) % 2
        return [Candidates([token + 1 + off], [1.0]) for token in batch.tokens]

    def keep(self, path: Sequence[int], surviving: Iterable[int]) -> None:
        self.tokens += [self.rows[row] for row in path]

    def truncate(self, length: int) -> None:
        raise AssertionError("a root only moves on")


@pytest.mark.parametrize("stale", [0, 1, 4])
def test_a_root_knows_the_features_before_it_but_the_last_ones(stale: int):
    engine: Any = Counting()

    found = list(hits(engine, TEXT, FEATURES, stale, 4096))

    indices = range(PROMPT - 1, PROMPT + ANSWER - 1, STRIDE)
    assert engine.roots == [(index, index - stale) for index in indices]
    assert engine.sampling == Sampling(temperature=0.7, seed=3)
    assert [set(chain) for chain in found] == [{stale % 2 == 0}] * len(indices)
    assert [len(chain) for chain in found] == [5, 5, 5, 5, 3]


def test_an_engine_without_features_is_fed_none():
    engine: Any = Counting()

    list(hits(engine, TEXT, None, 0, 4096))

    assert {known for _, known in engine.roots} == {0}


def test_the_time_of_a_guess_is_that_of_one_growth_step():
    engine: Any = Counting()
    ticks = iter(range(1000))

    taken = seconds_per_guess(engine, TEXT, FEATURES, 4096, clock=lambda: 10.0 * next(ticks))

    assert taken == [10.0 / DEPTHS] * len(range(PROMPT - 1, PROMPT + ANSWER - DEPTHS, STRIDE))


def test_a_guess_counts_where_all_in_front_are_right():
    chains = [[True, True, False, True, True], [True, False, True], [False, True], [True, True, True, True, False]]

    assert rates(chains) == (0.75, 2 / 3, 0.5, 1.0, 0.0)
    assert rates([]) == (None,) * DEPTHS


def test_a_drafter_of_features_is_walked_along_a_text(tmp_path: Path):
    """What it guesses does not depend on how far apart the roots are, with fresh features."""
    write_target(tmp_path / "target", num_hidden_layers=4)
    target = write_target(tmp_path / "target", num_hidden_layers=4)
    folder = write_drafter("reduced head", tmp_path / "drafter", target)
    engine = load(setup("eagle3", folder, tmp_path / "target"))
    assert engine.features is not None
    width = len(engine.features.outputs) * engine.features.width
    random = np.random.default_rng(0)
    features = random.standard_normal((40, width)).astype(np.float32)
    tokens = tuple(int(token) for token in random.integers(0, VOCABULARY, 40))
    whole, late = (
        list(hits(engine, TargetText(tokens=tokens, prompt=prompt, temperature=1.0, seed=1), features, 0, VOCABULARY))
        for prompt in (12, 12 + STRIDE)
    )

    assert whole[1:] == late
    assert len(whole[0]) == DEPTHS
