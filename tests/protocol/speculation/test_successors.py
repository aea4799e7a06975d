"""The table of successors: what its rows mean, what makes it, and that a damaged file costs no more than itself."""

import json
from array import array
from pathlib import Path

import numpy as np
import pytest

from draft_worker.training.rows import Answers
from draft_worker.training.successors import successors
from protocol.speculation.prompt_lookup import PromptLookup
from protocol.speculation.successors import ANY, CERTAIN, SUCCESSORS, Successors, stored_successors
from tests.support.paths import ROOT

HALF = CERTAIN // 2
TABLE = array("I", [1, 2, 7, HALF, 8, 9, 3, CERTAIN, ANY, 2, 5, HALF // 2, ANY, 7, 4, HALF]).tobytes()


@pytest.mark.parametrize(
    ("before", "last", "found"),
    [(1, 2, (7, 0.5)), (6, 2, (5, 0.25)), (8, 9, (3, 1.0)), (6, 9, None), (ANY - 1, 7, (4, 0.5)), (0, 0, None)],
)
def test_two_tokens_decide_and_else_the_last_one(before: int, last: int, found: tuple[int, float] | None):
    assert Successors(TABLE).after(before, last) == (found and (found[0], pytest.approx(found[1], abs=1e-6)))


def test_guesses_are_the_texts_own_or_the_tables_whichever_is_more_probable():
    lookup = PromptLookup(Successors(TABLE))

    assert [token for token, _ in lookup.chain([1, 2], 4)] == [7, 4]
    assert list(lookup.chain([2], 4)) == []
    lookup.extend([6, 2, 8] * 9)
    assert [token for token, _ in lookup.chain([6, 2], 3)] == [8, 6, 2]
    assert [token for token, _ in lookup.chain([1, 2], 1)] == [8]
    assert lookup.continuations([1, 7], 1) == []


@pytest.mark.parametrize("content", [TABLE[:-4], TABLE[16:32] + TABLE[:16], b"no table at all"])
def test_a_damaged_file_is_left_out(tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture):
    assert stored_successors(tmp_path) is None
    (tmp_path / SUCCESSORS).write_bytes(content)

    assert stored_successors(tmp_path) is None
    assert f"{tmp_path / SUCCESSORS} is left out" in caplog.text


def test_it_is_made_of_what_the_target_wrote_behind_the_same_text():
    answers = Answers.blank([0.0, 0.7], 12)
    given, own = [False] * 2, [True] * 4
    end = answers.put(0, 0, [1, 2, 3, 2, 3, 4], given + own)
    answers.put(0, end, [2, 9, 2, 3, 2, 3], given + own)
    answers.put(1, 0, [5, 2, 3, 2, 3, 4], given + own)

    made = Successors(successors([answers]))

    # Behind 2 the target wrote 3 in all six places; 9 was given. Behind 2, 3 it wrote 2 three times and 4 twice.
    assert made.after(0, 2) == (3, pytest.approx(5.25 / 6))
    assert made.after(2, 3) == made.after(0, 3) == (2, pytest.approx(2.25 / 5))
    assert made.after(0, 9) is None


@pytest.mark.parametrize(
    ("texts", "own"),
    [([[1, 2]], True), ([[1, 9, 3]], False), ([[1, 9, 2], [1, 9, 3], [1, 9, 4]], True)],
    ids=["short", "nothing of its own", "nothing that comes again"],
)
def test_of_too_little_text_it_is_empty(texts: list[list[int]], own: bool):
    answers = Answers.blank([0.0] * len(texts), 3)
    for row, text in enumerate(texts):
        answers.put(row, 0, text, [*[False] * (len(text) - 1), own])

    assert Successors(successors([answers])).after(1, 9) is None


def test_the_shipped_table_names_tokens_of_the_default_target():
    folder = ROOT / "draft_worker" / "default_draft"
    table, rows = stored_successors(folder), np.fromfile(folder / SUCCESSORS, "<u4").reshape(-1, 4)
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]

    assert table is not None
    assert all(column.max() < vocabulary for column in (rows[rows[:, 0] != ANY, 0], rows[:, 1], rows[:, 2]))
    before, last, following, chance = map(int, rows[len(rows) // 2])
    assert table.after(before, last) == (following, chance / CERTAIN)
