"""Rows of a drafter that reads features: any interleaving of features, trees and cuts equals a row-by-row reference."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_worker.conditioned.engine import ConditionedEngine, ConditionedSequence
from draft_worker.engine_interface import Batch
from draft_worker.engines.eagle3 import loaded
from protocol.messages.sampling import Sampling
from protocol.sampling.gumbel_noise import Noise, scores
from protocol.speculation.token_tree import Candidates
from tests.support.eagle3_reference import Reference, Row
from tests.support.models import eagle3_folders as folders
from tests.support.models.drafter_files import VOCABULARY, WIDTH

HEAD = folders.HEAD_TOKENS
GREEDY = Sampling(temperature=0.0)
FEATURES = np.random.default_rng(3).normal(size=(400, 3 * WIDTH)).astype(np.float32)


def _engine(folder: Path) -> ConditionedEngine:
    return ConditionedEngine("eagle3", folder, loaded(folder, None), "tiny", folder)


@pytest.fixture(scope="module", params=[folders.safe_ai_lab, folders.several_layers])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return request.param(tmp_path_factory.mktemp("eagle3"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> ConditionedEngine:
    return _engine(folder)


def _tokens(count: int, seed: int = 1) -> list[int]:
    return [random.Random(seed + index).randrange(VOCABULARY) for index in range(count)]


def _opened(engine: ConditionedEngine, sampling: Sampling = GREEDY) -> ConditionedSequence:
    return engine.open(sampling, VOCABULARY)


def _fed(engine: ConditionedEngine, tokens: Sequence[int], sampling: Sampling = GREEDY) -> ConditionedSequence:
    sequence = _opened(engine, sampling)
    sequence.prefill(tokens)
    sequence.feed(0, FEATURES[: len(tokens)])
    return sequence


def _batch(tokens: Sequence[int], parents: Sequence[int] = (-1,), committed: Sequence[int] = ()) -> Batch:
    return Batch(committed, tokens, parents, len(HEAD))


def _chances(found: Candidates) -> list[float]:
    """By column of the head."""
    chances = dict(zip(found.tokens, found.probabilities, strict=True))
    return [chances[token] for token in HEAD]


def _assert_alike(ours: Sequence[Candidates], expected: Sequence[Any]) -> None:
    for found, logits in zip(ours, expected, strict=True):
        shares = np.exp(logits - logits.max())
        assert np.allclose(_chances(found), shares / shares.sum(), atol=1e-4)


def _assert_as_fed(sequence: ConditionedSequence, engine: ConditionedEngine, tokens: Sequence[int]) -> None:
    """It guesses what one that was fed all at once guesses."""
    assert sequence.committed == len(tokens)
    whole = _fed(engine, tokens).evaluate(_batch([3]))
    assert np.allclose(_chances(sequence.evaluate(_batch([3]))[0]), _chances(whole[0]), atol=1e-5)


class Simulated:
    """What a sequence promises, row by row. Every row keeps what it read, and its key, value and output."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self.tokens: list[int] = []
        self.features: dict[int, Any] = {}
        self._rows: dict[int, tuple[Row, Any, bool]] = {}
        """By committed token: the row, what it read, whether that was a true feature."""
        self.nodes: dict[int, tuple[int, int, Row, Any, bool]] = {}
        """By number: token, parent, and the same."""
        self.next_row = 0
        self._tip: tuple[int, Any] = (-1, None)

    def evaluate(self, batch: Batch) -> list[Any]:
        self.tokens += batch.committed
        self.next_row += len(batch.committed)
        due = [
            token
            for token in range(1, len(self.tokens))
            if token not in self._rows or (not self._rows[token][2] and token - 1 in self.features)
        ]
        for token in range(min(due), len(self.tokens)) if due else ():
            read, true = self._input(token)
            path = [self._rows[each][0] for each in range(1, token)]
            row = self._reference.row(self.tokens[token], read, path, token)
            self._rows[token] = row, read, true
            self._tip = token, row.output
        return [self._node(*each) for each in zip(batch.tokens, batch.parents, strict=True)]

    def keep(self, path: Sequence[int], surviving: Sequence[int]) -> None:
        for number in path:
            token, _, row, read, true = self.nodes[number]
            self._rows[len(self.tokens)] = row, read, true
            self._tip = len(self.tokens), row.output
            self.tokens.append(token)
        self.nodes = {number: self.nodes[number] for number in surviving}

    def truncate(self, length: int) -> None:
        del self.tokens[length:]
        self.nodes = {}
        self.features = {token: each for token, each in self.features.items() if token < length}
        self._rows = {token: row for token, row in self._rows.items() if token < length}
        if self._tip[0] >= length:
            self._tip = (-1, None)

    def path(self, number: int) -> list[int]:
        """Numbers of the nodes from the root down."""
        return [*self.path(self.nodes[number][1]), number] if number in self.nodes else []

    def _input(self, token: int) -> tuple[Any, bool]:
        if token - 1 in self.features:
            return self._reference.fuse(self.features[token - 1]), True
        if token in self._rows:
            return self._rows[token][1], False
        return (self._tip[1] if self._tip[0] == token - 1 else np.zeros(WIDTH)), False

    def _node(self, token: int, parent: int) -> Any:
        above = [self.nodes[number][2] for number in self.path(parent)]
        place = len(self.tokens) + len(above)
        read, true = (above[-1].output, False) if above else self._input(place)
        path = [row for row, _, _ in (self._rows[each] for each in sorted(self._rows))] + above
        row = self._reference.row(token, read, path, place)
        self.nodes[self.next_row] = token, parent, row, read, true
        self.next_row += 1
        return self._reference.logits(row)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32))
def test_any_interleaving_equals_the_reference(engine: ConditionedEngine, folder: Path, seed: int):
    chance = random.Random(seed)
    ours, expected = _opened(engine), Simulated(Reference.of(folder))
    begin = _tokens(chance.randrange(1, 12), seed)
    ours.prefill(begin)
    expected.tokens += begin
    for _ in range(12):
        match chance.randrange(5):
            case 0 | 1:
                _grow(ours, expected, chance)
            case 2 if expected.tokens:
                first = chance.randrange(len(expected.tokens))
                end = chance.randrange(first, len(expected.tokens)) + 1
                ours.feed(first, FEATURES[first:end])
                expected.features |= {token: FEATURES[token] for token in range(first, end)}
            case 3 if expected.nodes:
                path = expected.path(chance.choice(list(expected.nodes)))
                living = [number for number in expected.nodes if path[-1] in expected.path(number)[:-1]]
                ours.keep(path, living)
                expected.keep(path, living)
            case 4 if chance.random() < 0.4:
                length = chance.randrange(1, len(expected.tokens) + 1)
                ours.truncate(length)
                expected.truncate(length)
            case _ if ours.unread:
                ours.read(3)
        assert ours.committed == len(expected.tokens)
        assert ours.next_row == expected.next_row


def _grow(ours: ConditionedSequence, expected: Simulated, chance: random.Random) -> None:
    caught = [] if expected.nodes else [chance.randrange(VOCABULARY) for _ in range(chance.randrange(3))]
    width, numbers = chance.randrange(1, 5), list(expected.nodes)
    roots = numbers or [-1]
    parents: list[int] = []
    for row in range(width):
        new = range(expected.next_row + len(caught), expected.next_row + len(caught) + row)
        parents.append(chance.choice([*roots, *new]))
    batch = _batch([chance.randrange(VOCABULARY) for _ in parents], parents, caught)
    _assert_alike(ours.evaluate(batch), expected.evaluate(batch))


def test_a_prompt_read_in_chunks_equals_one_forward(engine: ConditionedEngine):
    tokens, chunked = _tokens(90), _opened(engine)
    for first in range(0, 90, 30):
        chunked.prefill(tokens[first : first + 30])
        chunked.feed(first, FEATURES[first : first + 30])
        while chunked.unread:
            chunked.read(12)

    _assert_as_fed(chunked, engine, tokens)


def test_reading_is_wanted_only_for_many_tokens_with_features(engine: ConditionedEngine):
    sequence = _opened(engine)
    sequence.prefill(_tokens(60))
    assert not sequence.unread
    assert sequence.staleness == 60

    sequence.feed(0, FEATURES[:40])
    assert sequence.unread
    assert sequence.staleness == 20

    sequence.read(512)
    assert not sequence.unread


def test_behind_many_tokens_without_features_nothing_is_guessed_until_features_come(engine: ConditionedEngine):
    tokens, sequence = _tokens(60), _opened(engine)
    sequence.prefill(tokens)
    assert sequence.evaluate(_batch([7, 8], (-1, 0))) == [Candidates([], [])] * 2
    sequence.keep((0,), (1,))
    assert sequence.evaluate(_batch([9], (1,))) == [Candidates([], [])]
    sequence.keep((1,), ())
    sequence.feed(0, FEATURES[:62])

    _assert_as_fed(sequence, engine, [*tokens, 7, 8])


def test_rows_begin_at_the_first_fresh_feature(engine: ConditionedEngine, folder: Path):
    tokens, sequence = _tokens(60), _opened(engine)
    sequence.prefill(tokens)
    sequence.feed(50, FEATURES[50:60])

    found = sequence.evaluate(_batch([7, 8], (-1, 0)))

    reference, rows = Reference.of(folder), list[Row]()
    for token in range(51, 61):
        rows.append(reference.row([*tokens, 7][token], reference.fuse(FEATURES[token - 1]), rows, token))
    last = reference.row(8, rows[-1].output, rows, 61)
    _assert_alike(found, [reference.logits(rows[-1]), reference.logits(last)])


def test_earlier_features_that_come_late_move_the_first_row_back(engine: ConditionedEngine):
    tokens, sequence = _tokens(60), _opened(engine)
    sequence.prefill(tokens)
    sequence.feed(50, FEATURES[50:60])
    sequence.evaluate(_batch([7, 8], (-1, 0)))
    sequence.feed(0, FEATURES[:50])
    sequence.keep((0,), (1,))
    sequence.evaluate(_batch([9], (1,)))
    sequence.truncate(60)

    _assert_as_fed(sequence, engine, tokens)


def test_a_copy_goes_on_by_itself(engine: ConditionedEngine):
    tokens = _tokens(40)
    sequence = _fed(engine, tokens)
    sequence.evaluate(_batch([7]))
    before = [sequence.reopen(length, GREEDY, VOCABULARY, exclusive=False) for length in (40, 25)]
    sequence.keep((0,), ())
    for length, copy in zip((40, 25), before, strict=True):
        _assert_as_fed(copy, engine, tokens[:length])


def test_sequences_in_one_forward_equal_each_alone(engine: ConditionedEngine):
    def opened() -> list[ConditionedSequence]:
        stale = _opened(engine)
        stale.prefill(_tokens(5, 9))
        return [_fed(engine, _tokens(12)), stale, _fed(engine, _tokens(3, 4))]

    batches = [_batch([7, 8], (-1, 0)), _batch([9, 1, 2], (-1, 0, 0)), _batch([3])]
    assert engine.joint

    joint = engine.evaluate_together(list(zip(opened(), batches, strict=True)))

    for found, sequence, batch in zip(joint, opened(), batches, strict=True):
        for ours, alone in zip(found, sequence.evaluate(batch), strict=True):
            assert np.allclose(_chances(ours), _chances(alone), atol=1e-5)


@pytest.mark.parametrize("largest", [6e4, -6e4])
def test_the_largest_features_never_give_broken_candidates(engine: ConditionedEngine, largest: float):
    sequence, rows = _opened(engine), FEATURES[:10].copy()
    sequence.prefill(_tokens(10))
    rows[3, 5], rows[9] = largest, largest
    sequence.feed(0, rows)
    sequence.feed(0, FEATURES[:4, :5])

    for found in sequence.evaluate(_batch([7, 8], (-1, 0))):
        assert np.isfinite(found.probabilities).all()
        assert set(found.tokens) <= set(HEAD)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_candidates_are_ranked_with_the_noise_of_the_head_s_tokens(engine: ConditionedEngine, temperature: float):
    tokens = _tokens(20)
    logits = np.log(_chances(_fed(engine, tokens).evaluate(_batch([7]))[0]))
    whole = np.full((1, VOCABULARY), -np.inf, np.float32)
    whole[0, list(HEAD)] = logits
    for seed in range(20):
        sampling = Sampling(temperature=temperature, seed=seed)
        found = _fed(engine, tokens, sampling).evaluate(_batch([7]))[0]
        sampled = np.argmax(np.array(scores(mx.array(whole), [21], sampling, Noise(VOCABULARY))))
        assert found.tokens[0] == sampled


def test_a_prompt_of_one_token(engine: ConditionedEngine, folder: Path):
    reference, sequence = Reference.of(folder), _opened(engine)
    first = reference.row(7, np.zeros(WIDTH), [], 0)
    second = reference.row(8, first.output, [first], 1)

    _assert_alike(sequence.evaluate(_batch([7, 8], (-1, 0))), [reference.logits(row) for row in (first, second)])
