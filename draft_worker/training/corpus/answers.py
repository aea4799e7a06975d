"""Lets a target answer prompts, and packs the texts into rows. Knows no drafter and no states."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import BatchGenerator

from draft_worker.training.corpus.rows import Answers

TEMPERATURES = (0.0, 0.7, 1.0)
"""A third of the rows each."""
LONGEST_ANSWER = 320
_LEAST_ROOM = 32
"""Slots at the end of a row that no new text begins in."""
_AT_ONCE = 32
_LOOP, _REPEATS = 5, 3

Prompt = Sequence[Sequence[int]]
"""Tokens of a user's turns; each but the first also has what follows the answer before it."""


class AnswerText:
    """One conversation: the turns' tokens are given, the target writes the answers."""

    def __init__(self, turns: Prompt, temperature: float) -> None:
        self.temperature = temperature
        self.tokens = list(turns[0])
        self.own = [False] * len(self.tokens)
        self._later = list(turns[1:])

    def answered(self, answer: Sequence[int], *, ended: bool) -> bool:
        """Take an answer; whether another turn follows. A loop or a cut ends the conversation."""
        kept = without_loop(answer)
        self.tokens += kept
        self.own += [True] * len(kept)
        if not ended or len(kept) < len(answer) or not self._later:
            return False
        turn = list(self._later.pop(0))
        # A template repeats the token that ended the answer.
        turn = turn[1:] if turn[:1] == list(answer[-1:]) else turn
        self.tokens += turn
        self.own += [False] * len(turn)
        return True


def without_loop(answer: Sequence[int]) -> list[int]:
    """The answer up to where a run of five tokens occurs for the fourth time: greedy text that loops teaches little."""
    runs: Counter[tuple[int, ...]] = Counter()
    for end in range(_LOOP, len(answer) + 1):
        run = tuple(answer[end - _LOOP : end])
        runs[run] += 1
        if runs[run] > _REPEATS:
            return list(answer[:end])
    return list(answer)


def texts(model: Any, prompts: Iterator[Prompt], ends: Sequence[int]) -> Iterator[AnswerText | None]:
    """Endless finished texts, at the temperatures in turn; None after each step. `ends`: tokens that end an answer."""
    generator = BatchGenerator(model, stop_tokens=[[token] for token in ends], completion_batch_size=_AT_ONCE)
    open_texts: dict[int, tuple[AnswerText, list[int]]] = {}

    def ask(text: AnswerText) -> None:
        sampler = samplers[text.temperature]
        (number,) = generator.insert([text.tokens], [LONGEST_ANSWER], samplers=[sampler])
        open_texts[number] = text, []

    samplers = {temperature: _sampler(temperature) for temperature in TEMPERATURES}
    started = 0
    try:
        while True:
            while len(open_texts) < _AT_ONCE:
                ask(AnswerText(next(prompts), TEMPERATURES[started % len(TEMPERATURES)]))
                started += 1
            for response in generator.next_generated():
                text, answer = open_texts[response.uid]
                answer.append(response.token)
                if response.finish_reason is None:
                    continue
                del open_texts[response.uid]
                if text.answered(answer, ended=response.finish_reason == "stop"):
                    ask(text)
                else:
                    yield text
            yield None
    finally:
        generator.close()


def _sampler(temperature: float) -> Callable[[mx.array], mx.array]:
    if temperature == 0:
        return lambda logits: mx.argmax(logits, axis=-1)
    return lambda logits: mx.random.categorical(logits / temperature)


def packed(found: Iterator[AnswerText | None], rows: int, slots: int) -> Iterator[Answers | int]:
    """Fill one shard: how many tokens the target has written, after each step, and the shard last.

    A text goes into the open row of its temperature, and is cut at the row's end.
    """
    temperatures = np.array([TEMPERATURES[row % len(TEMPERATURES)] for row in range(rows)], np.float32)
    answers = Answers(
        np.zeros((rows, slots), np.int32),
        np.zeros((rows, slots), bool),
        np.zeros((rows, slots), np.int32),
        temperatures,
    )
    waiting = {each: [row for row in range(rows) if temperatures[row] == np.float32(each)] for each in TEMPERATURES}
    filled = np.zeros(rows, np.int64)
    while any(waiting.values()):
        text = next(found)
        if text is None:
            yield int(answers.own.sum())
            continue
        if not waiting[text.temperature]:
            continue
        row = waiting[text.temperature][0]
        begin, end = int(filled[row]), min(slots, int(filled[row]) + len(text.tokens))
        answers.tokens[row, begin:end] = text.tokens[: end - begin]
        answers.own[row, begin:end] = text.own[: end - begin]
        answers.starts[row, begin:end] = begin
        answers.starts[row, end:] = end
        filled[row] = end
        if slots - end < _LEAST_ROOM:
            waiting[text.temperature].pop(0)
    yield answers
