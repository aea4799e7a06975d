"""Files of conversations that the target wrote, as shards."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from draft_worker.training.answers import unpack_text
from draft_worker.training.own_text import OwnText, filled, read_own_text
from draft_worker.training.rows import HELD_OUT, Answers, answers_path, read_answers
from protocol.contracts.training import TrainingChoices
from protocol.errors import InputError
from tests.support.models.training_work import write_own_text

_CHOICES = TrainingChoices(kind="lm", rows=2, slots=16)


def _text(first: int, length: int, temperature: float = 0.0) -> OwnText:
    kinds = np.array([0, 0, 2, 0, *[1] * (length - 4)], np.uint8)
    return OwnText(np.arange(first, first + length, dtype=np.uint16), kinds, temperature)


def _file(folder: Path, count: int = 81) -> Path:
    write_own_text(folder / "text.xz", [_text(10 * each, 9, (0.0, 0.3)[each % 2]) for each in range(count)])
    return folder / "text.xz"


def test_a_file_holds_what_was_written(tmp_path: Path):
    found = read_own_text(_file(tmp_path, 3))

    assert [each.tokens.tolist() for each in found] == [list(range(first, first + 9)) for first in (0, 10, 20)]
    assert found[1].kinds.tolist() == [0, 0, 2, 0, 1, 1, 1, 1, 1]
    assert [each.temperature for each in found] == [0.0, 0.3, 0.0]


def test_rows_have_one_temperature_and_end_at_their_slots():
    answers = filled([_text(0, 9), _text(20, 9), _text(40, 9), _text(60, 6, 0.7)], slots=16)

    assert answers.temperatures.tolist() == pytest.approx([0.0, 0.0, 0.7])
    assert answers.tokens[0].tolist() == [*range(9), *range(20, 27)]
    assert answers.starts[0].tolist() == [0] * 9 + [9] * 7
    assert answers.starts[2].tolist() == [0] * 6 + [6] * 10
    assert np.flatnonzero(answers.own[0]).tolist() == [4, 5, 6, 7, 8, 13, 14, 15]


def test_one_conversation_of_forty_is_held_out(tmp_path: Path):
    unpack_text(_file(tmp_path), 1000, tmp_path / "work", _CHOICES)

    firsts = [
        {int(row[start]) for path in sorted((folder / "answers").iterdir()) for row, start in _starts(path)}
        for folder in (tmp_path / "work" / HELD_OUT, tmp_path / "work")
    ]
    assert len(firsts[0]) == 2
    assert len(firsts[0] | firsts[1]) == 81


def test_no_more_is_unpacked_than_asked_for_and_the_same_whenever_it_is(tmp_path: Path):
    file, at_once, later = _file(tmp_path), tmp_path / "at-once", tmp_path / "later"
    unpack_text(file, 1000, at_once, _CHOICES)
    unpack_text(file, 1000, later, _choices(tokens=40))
    few = _shards(later)
    unpack_text(file, 1000, later, _choices(tokens=80))

    assert _own(few[:-1]) < 40 <= _own(few)
    assert len(few) < len(_shards(later)) < len(_shards(at_once))
    for found, whole in zip(_shards(later), _shards(at_once), strict=False):
        np.testing.assert_array_equal(found.tokens, whole.tokens)


def test_the_file_is_not_read_where_shards_are_enough(tmp_path: Path):
    work = tmp_path / "work"
    unpack_text(_file(tmp_path), 1000, work, _choices(tokens=40))
    before = read_answers(answers_path(work, 0)).tokens

    unpack_text(tmp_path / "missing.xz", 1000, work, _choices(tokens=40))

    np.testing.assert_array_equal(read_answers(answers_path(work, 0)).tokens, before)


def _choices(tokens: int) -> TrainingChoices:
    return msgspec.structs.replace(_CHOICES, tokens=tokens)


def _shards(work: Path) -> list[Answers]:
    return [read_answers(path) for path in sorted((work / "answers").iterdir())]


def _own(shards: list[Answers]) -> int:
    return sum(int(each.own.sum()) for each in shards)


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"no stream", "no file of a target's own text"), (None, "the target has 50"), (1, "too few conversations")],
)
def test_files_that_don_t_fit_are_refused(tmp_path: Path, content: bytes | int | None, words: str):
    path = _file(tmp_path, content if isinstance(content, int) else 20)
    if isinstance(content, bytes):
        path.write_bytes(content)

    with pytest.raises(InputError, match=words):
        unpack_text(path, 50, tmp_path / "work", _CHOICES)


def _starts(path: Path):
    answers = read_answers(path)
    for row, starts in zip(answers.tokens, answers.starts, strict=True):
        yield from ((row, start) for start in np.unique(starts) if (row[start:] > 0).any())
