"""Laws of rows that are ranked once: their candidates are those of whole rows of logits, guesses by lookup included."""

from collections.abc import Sequence
from itertools import product

import mlx.core as mx
import numpy as np
import pytest

from draft_worker.candidates.block_candidates import RankedRows
from draft_worker.candidates.head_columns import Columns
from draft_worker.engine_interface import Batch
from protocol.messages.sampling import Sampling

_TOKENS, _ROWS, _FIRST = 3000, 5, 70
_HEAD = np.flatnonzero(np.random.default_rng(1).random(_TOKENS) < 0.5).astype(np.int32)
_COLUMNS = {
    "whole": Columns(_TOKENS, _TOKENS),
    "shared in part": Columns(_TOKENS + 100, _TOKENS - 50),
    "short": Columns(_TOKENS, _TOKENS, _HEAD),
}
_KINDS = {"32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}


def logits(columns: Columns, seed: int, kind: mx.Dtype = mx.float32) -> mx.array:
    """As a language model has them: a few tokens are far ahead."""
    rows = 2.0 * np.random.default_rng(seed).standard_normal((_ROWS, columns.count + 7)).astype(np.float32)
    rows[:, 5:400:80] += 7.0
    return mx.array(rows).astype(kind)


def guesses(columns: Columns, rows: mx.array, seed: int) -> list[list[tuple[int, float]]]:
    """Of each row: none, likely tokens, unlikely ones and such that may have no column."""
    draw = np.random.default_rng(seed)
    names = np.arange(_TOKENS) if columns.tokens is None else columns.tokens
    found: list[list[tuple[int, float]]] = []
    for row in np.array(rows[:, : columns.count].astype(mx.float32)):
        likely, unlikely = names[np.argsort(-row)[:6]], names[np.argsort(row)[:4]]
        pool = np.unique([*likely, *unlikely, *draw.integers(0, _TOKENS, 5)])
        tokens = draw.permutation(pool)[: draw.integers(0, 9)]
        chances = draw.dirichlet(np.ones(len(tokens) + 1))[:-1] if len(tokens) else []
        found.append([(int(token), float(chance)) for token, chance in zip(tokens, chances, strict=True)])
    return found


def whole(
    columns: Columns, rows: mx.array, sampling: Sampling, limit: int, followers: Sequence[Sequence[tuple[int, float]]]
) -> list:
    """The candidates of whole rows of logits."""
    batch = Batch((), (), (), limit, followers=followers)
    return columns.propose(rows, range(_FIRST, _FIRST + _ROWS), sampling, batch)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("temperature", [0.0, 0.3, 0.7, 1.3])
@pytest.mark.parametrize(("name", "kind"), [*product(_COLUMNS, _KINDS)])
def test_candidates_are_those_of_whole_rows(name: str, kind: str, temperature: float):
    columns = _COLUMNS[name]
    for seed, limit in product(range(8), (1, 4, 16)):
        sampling, rows = Sampling(temperature=temperature, seed=seed), logits(columns, seed, _KINDS[kind])
        followers = guesses(columns, rows, seed)
        ranked = RankedRows(rows, _FIRST, columns, sampling, 16)
        own = columns.followers(Batch((), (), (), 4, followers=followers))

        plain = [ranked.candidates(row, (), limit) for row in range(_ROWS)]
        found = [ranked.candidates(row, own[row], limit) for row in range(_ROWS)]

        assert plain == whole(columns, rows, sampling, limit, ())
        expected = whole(columns, rows, sampling, limit, followers)
        assert [each.tokens for each in found] == [each.tokens for each in expected]
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.probabilities == pytest.approx(theirs.probabilities, rel=2e-5, abs=1e-7)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_guess_of_no_probability_in_the_draft_counts_as_lookup_says(temperature: float):
    columns, rows = _COLUMNS["whole"], np.zeros((_ROWS, _TOKENS), np.float32)
    rows[:, 9] = -1e30
    sampling = Sampling(temperature=temperature, seed=3)
    ranked = RankedRows(mx.array(rows), _FIRST, columns, sampling, 4)

    found = [ranked.candidates(row, [(9, 0.6)], 4) for row in range(_ROWS)]

    expected = whole(columns, mx.array(rows), sampling, 4, [[(9, 0.6)]] * _ROWS)
    assert [each.tokens for each in found] == [each.tokens for each in expected]
    assert all(9 in each.tokens for each in found)
