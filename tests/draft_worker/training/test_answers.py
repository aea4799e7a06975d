"""The target's answers and states."""

from itertools import cycle
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from draft_worker.training.answers import Text, packed, texts, without_loop
from draft_worker.training.preparation import record_states
from draft_worker.training.rows import Answers, Shards, save_answers, save_states, state_outputs
from draft_worker.training.states import tap_of
from draft_worker.training.target import Target
from protocol.errors import InputError
from protocol.messages.features import FINAL
from tests.support.models.tiny_models import stock_logits


def _text(length: int, temperature: float = 0.0) -> Text:
    text = Text([list(range(length))], temperature)
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
    text = Text([[1, 2], [7, 8, 9]], 0.0)

    assert text.answered([5, 7], ended=True)

    assert text.tokens == [1, 2, 5, 7, 8, 9]
    assert text.own == [False, False, True, True, False, False]
    assert not text.answered([5], ended=True)


def test_greedy_answers_in_a_batch_are_the_target_s_own(target: Target):
    prompts = cycle([[[5, 6, 7]], [[9, 8, 7, 6]], [[30, 31]]])

    text = next(each for each in texts(target.model, prompts, target.ends) if each and each.temperature == 0)

    first = text.own.index(True)
    for place in range(first, first + 6):
        assert text.tokens[place] == mx.argmax(stock_logits(target.model, text.tokens[:place])).item()


def test_states_of_another_target_are_refused(target: Target, tmp_path: Path):
    tokens = np.zeros((2, 4), np.int32)
    save_answers(tmp_path, 0, Answers(tokens, tokens > 0, tokens, np.zeros(2, np.float32)))
    state_outputs(tmp_path, (FINAL,))
    save_states(tmp_path, 0, np.zeros((2, 4, 1, target.width + 1)))

    with pytest.raises(InputError, match="states of another target"):
        record_states(target, tmp_path, (FINAL,), lambda _: None)


def test_a_target_without_taps_is_refused(target: Target):
    class Odd:
        """A model whose layers can't be found."""

    with pytest.raises(InputError, match=r"can't be recorded.*choose another target"):
        tap_of(Odd(), str(target.folder))


def test_recorded_states_give_the_target_s_logits(target: Target, work: Path):
    row = Shards(work).row(0)

    logits = np.array(mx.array(row.states[25, -1]) @ target.head().T)

    np.testing.assert_allclose(logits, np.array(stock_logits(target.model, row.tokens[20:26].tolist())), atol=0.05)
