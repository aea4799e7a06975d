"""The target's answers and states."""

import errno
import shutil
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import pytest

from draft_worker.training.answers import AnswerText, claim, divided, packed, record_states, texts, without_loop
from draft_worker.training.rows import Answers, Shards, save_answers, save_states, stored
from draft_worker.training.target import Target
from protocol.errors import InputError, PipelineError
from tests.support.models.tiny_models import stock_logits
from tests.support.models.training_work import write_target


def _text(length: int, temperature: float = 0.0) -> AnswerText:
    text = AnswerText([list(range(length))], temperature)
    text.own = [False] * 2 + [True] * (length - 2)
    return text


def test_texts_fill_the_rows_of_their_temperature():
    found = cycle([_text(30, 0.0), _text(40, 0.7), None, _text(50, 1.0)])

    *_, answers = packed(found, rows=3, slots=64)

    assert isinstance(answers, Answers)
    assert np.unique(answers.starts[0]).tolist() == [0, 30, 60]
    assert np.unique(answers.starts[1]).tolist() == [0, 40]
    assert answers.tokens[0, 29:33].tolist() == [29, 0, 1, 2]
    assert answers.own[2].tolist() == [False] * 2 + [True] * 48 + [False] * 14
    np.testing.assert_allclose(answers.temperatures, [0.0, 0.7, 1.0])


def test_an_answer_ends_where_a_run_of_five_tokens_comes_for_the_fourth_time():
    answer = [9, *[1, 2, 3, 4, 5] * 6]

    assert without_loop(answer) == answer[: 1 + 4 * 5]
    assert without_loop(list(range(50))) == list(range(50))


def test_a_turn_follows_an_answer_that_ended_and_repeats_no_end():
    text = AnswerText([[1, 2], [7, 8, 9]], 0.0)

    assert text.answered([5, 7], ended=True)

    assert text.tokens == [1, 2, 5, 7, 8, 9]
    assert text.own == [False, False, True, True, False, False]
    assert not text.answered([5], ended=True)


@pytest.mark.thorough
def test_greedy_answers_in_a_batch_are_the_target_s_own(target: Target):
    prompts = cycle([[[5, 6, 7]], [[9, 8, 7, 6]], [[30, 31]]])

    text = next(each for each in texts(target.model, prompts, ()) if each and each.temperature == 0)

    first = text.own.index(True)
    for place in range(first, first + 6):
        assert text.tokens[place] == mx.argmax(stock_logits(target.model, text.tokens[:place])).item()


def test_answers_of_another_target_are_refused(target: Target, tmp_path: Path):
    claim(tmp_path, target)
    other = Target(write_target(tmp_path / "other", seed=1))
    # Nothing was answered yet.
    claim(tmp_path, other)
    claim(tmp_path, target)
    tokens = np.zeros((1, 4), np.int32)
    save_answers(tmp_path, 0, Answers(tokens, tokens > 0, tokens, np.zeros(1, np.float32)))

    claim(tmp_path, target)
    with pytest.raises(InputError, match=r"answers of another target \(.*target\): pass that one as --target"):
        claim(tmp_path, other)


def test_states_that_the_disk_has_no_room_for_are_refused(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tokens = np.zeros((2, 4), np.int32)
    save_answers(tmp_path, 0, Answers(tokens, tokens > 0, tokens, np.zeros(2, np.float32)))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: _Usage(free=500))

    with pytest.raises(InputError, match=r"\(8 tokens x 32 numbers x 2 bytes\).*start the same command again"):
        record_states(target, tmp_path, lambda _: None)


class _Usage(NamedTuple):
    free: int


def test_states_beyond_halves_are_cut():
    found = stored(np.array([1e9, -1e9, 0.5], np.float32))

    assert found.dtype == np.float16
    assert found.tolist() == [np.float16(65_000), np.float16(-65_000), 0.5]


def test_a_full_disk_is_named_and_leaves_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(path: Path, *_: object) -> None:
        path.write_bytes(b"part")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "save", full)

    with pytest.raises(PipelineError, match=r"final-states/shard-0003\.npy could not be written.*No space left"):
        save_states(tmp_path, 3, np.zeros((1, 1, 1), np.float16))

    assert list((tmp_path / "final-states").iterdir()) == []


def test_any_hundred_prompts_have_held_out_ones_that_stay_held_out(tmp_path: Path):
    for first in range(0, 1000, 100):
        prompts = [[[first + number, 1]] for number in range(100)]
        folder = tmp_path / str(first)

        trained, held_out = divided(prompts, 2, folder / "prompts.json")

        assert len(held_out) >= 2
        assert [prompt for prompt in prompts if prompt in trained or prompt in held_out] == prompts
        assert len(trained) + len(held_out) == len(prompts)
        more = [*reversed(prompts), *([[2, number]] for number in range(2000))]
        assert all(prompt in divided(more, 2, folder / "prompts.json")[1] for prompt in held_out)


def test_recorded_states_give_the_target_s_logits(target: Target, work: Path):
    row = Shards(work).row(0)

    logits = np.array(mx.array(row.states[25]) @ target.head().T)

    np.testing.assert_allclose(logits, np.array(stock_logits(target.model, row.tokens[20:26].tolist())), atol=0.05)
