"""The target answers prompts: rows of text in shards, and its states of them. Shards that exist are kept.

The same prompts are held out whatever their order, and also when further prompts are added.
"""

import hashlib
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import msgspec
import numpy as np
from mlx_lm.generate import BatchGenerator

from draft_worker.training.rows import (
    HELD_OUT,
    TEMPERATURES,
    Answers,
    Over,
    Report,
    answer_files,
    answers_path,
    read_answers,
    save_answers,
    save_states,
    states_path,
    stored,
    whole_file,
)
from draft_worker.training.target import Target
from protocol.contracts.training import TrainingChoices, TrainingProgress
from protocol.errors import InputError

LONGEST_ANSWER = 320
_LEAST_ROOM = 32
"""Slots at the end of a row that no new text begins in."""
_AT_ONCE = 32
_LOOP, _REPEATS = 5, 3
_SHORTEST = 4
"""Tokens of the longest answer that the end of the time does not prevent."""

_T = TypeVar("_T")
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


def texts(
    model: Any, prompts: Iterator[Prompt], ends: Sequence[int], over: Callable[[], bool] = lambda: False
) -> Iterator[AnswerText | None]:
    """Finished texts until the time is `over`, then the unfinished ones; at the temperatures in turn, None after each
    step. `ends`: tokens that end an answer."""
    generator = BatchGenerator(model, stop_tokens=[[token] for token in ends], completion_batch_size=_AT_ONCE)
    open_texts: dict[int, tuple[AnswerText, list[int]]] = {}

    def ask(text: AnswerText) -> None:
        sampler = samplers[text.temperature]
        (number,) = generator.insert([text.tokens], [LONGEST_ANSWER], samplers=[sampler])
        open_texts[number] = text, []

    samplers = {temperature: _sampler(temperature) for temperature in TEMPERATURES}
    started = 0
    try:
        longest = 0
        while not over() or longest < _SHORTEST:
            while len(open_texts) < _AT_ONCE:
                ask(AnswerText(next(prompts), TEMPERATURES[started % len(TEMPERATURES)]))
                started += 1
            for response in generator.next_generated():
                text, answer = open_texts[response.uid]
                answer.append(response.token)
                longest = max(longest, len(answer))
                if response.finish_reason is None:
                    continue
                del open_texts[response.uid]
                if text.answered(answer, ended=response.finish_reason == "stop"):
                    ask(text)
                else:
                    yield text
            yield None
        for text, answer in open_texts.values():
            text.answered(answer, ended=False)
            yield text
    finally:
        generator.close()


def _sampler(temperature: float) -> Callable[[mx.array], mx.array]:
    if temperature == 0:
        return lambda logits: mx.argmax(logits, axis=-1)
    return lambda logits: mx.random.categorical(logits / temperature)


def packed(found: Iterator[AnswerText | None], rows: int, slots: int) -> Iterator[Answers | int]:
    """Fill one shard: how many tokens the target has written, after each step, and the shard last.

    A text goes into the open row of its temperature, and is cut at the row's end. If the texts end, the shard has the
    rows that were begun.
    """
    answers = Answers.blank([TEMPERATURES[row % len(TEMPERATURES)] for row in range(rows)], slots)
    waiting = {each: [*range(first, rows, len(TEMPERATURES))] for first, each in enumerate(TEMPERATURES)}
    ends = [0] * rows
    while any(waiting.values()):
        try:
            text = next(found)
        except StopIteration:
            break
        if text is None:
            yield int(answers.own.sum())
            continue
        if not waiting[text.temperature]:
            continue
        row = waiting[text.temperature][0]
        ends[row] = answers.put(row, ends[row], text.tokens, text.own)
        if slots - ends[row] < _LEAST_ROOM:
            waiting[text.temperature].pop(0)
    begun = answers.own.any(1)
    yield Answers(*(each[begun] for each in answers))


_CHOSEN = Path(HELD_OUT) / "prompts.json"
_HELD_OUT_SHARE, _ANSWERS_SHARE = 0.1, 0.4
"""Of the time: when each stage ends with what it has, which is a little at least."""


def write_answers(
    target: Target,
    prompts: Path | None,
    ends: tuple[int, ...],
    work: Path,
    choices: TrainingChoices,
    report: Report,
    over: Over = lambda _: False,
) -> None:
    """Shards in `work` with at least as many tokens of the target's own, or as there is time for, and one of held-out
    prompts. An answer is over at one of `ends`.

    Raises InputError if there are none and no prompts to write them for.
    """
    given = _read(prompts) if prompts is not None else []
    # Held-out answers that exist need no more prompts.
    fewest = 0 if answer_files(work / HELD_OUT) else FEWEST
    trained, held_out = divided(given, fewest, work / _CHOSEN)
    stages = (work / HELD_OUT, 1, held_out, _HELD_OUT_SHARE), (work, choices.tokens, trained, _ANSWERS_SHARE)
    for folder, wanted, chosen, share in stages:
        written = _written(folder)
        if written >= wanted or (written and (prompts is None or over(share))):
            continue
        if min(len(trained), len(chosen)) < FEWEST:
            raise InputError(
                "There are too few prompts to train and to measure a drafter with: pass files with some hundred of "
                "them as --data, or the folder of an earlier training's answers as --work."
            )
        stage = "answers" if folder == work else "answers to held-out prompts"
        first = len(answer_files(folder))
        mx.random.seed(first)
        # One source for all shards: of texts that are dropped at the end of one, most would be long.
        found = texts(target.model, _shuffled(chosen, first), ends, partial(over, share))
        for number in count(first):
            begun = TrainingProgress(stage=stage, done=written, total=max(wanted, written), tokens=written)
            shard = _packed(found, choices, begun, report)
            save_answers(folder, number, shard)
            written += int(shard.own.sum())
            if written >= wanted or over(share):
                break


def _packed(
    found: Iterator[AnswerText | None], choices: TrainingChoices, begun: TrainingProgress, report: Report
) -> Answers:
    for step in packed(found, choices.rows, choices.slots):
        if isinstance(step, Answers):
            return step
        written = begun.tokens + step
        report(msgspec.structs.replace(begun, done=written, total=max(begun.total, written), tokens=written))
    raise AssertionError("a shard ends with itself")


def _written(folder: Path) -> int:
    """Tokens of the target's own in a folder's shards."""
    return sum(int(read_answers(path).own.sum()) for path in answer_files(folder))


def _read(path: Path) -> list[Prompt]:
    prompts = [msgspec.json.decode(line, type=list[list[int]]) for line in path.read_bytes().splitlines()]
    return [turns for turns in prompts if any(turns)]


def _shuffled(prompts: list[Prompt], seed: int) -> Iterator[Prompt]:
    """Endless; the same for the same seed."""
    rng = random.Random(seed)
    while True:
        yield from rng.sample(prompts, len(prompts))


_SHARE = 40
"""One of so many prompts is never trained on."""
FEWEST = 2
"""That answers are written for."""


def divided(prompts: Sequence[Prompt], fewest: int, file: Path) -> tuple[list[Prompt], list[Prompt]]:
    """Those to train on, and those held out: one of forty by a hash of its tokens, and at least `fewest`.

    `file` keeps which ones were needed for that, so that none of them is trained on later.
    """
    hashes = [hashlib.sha256(msgspec.json.encode(prompt)).hexdigest() for prompt in prompts]
    kept = _kept(file, list[str]) or []
    chosen = {each for each in hashes if int(each[:8], 16) % _SHARE == 0 or each in kept}
    lacking = sorted({*hashes} - chosen)[: max(0, fewest - len(chosen))]
    if lacking:
        with whole_file(file) as unfinished:
            unfinished.write_bytes(msgspec.json.encode([*kept, *lacking]))
    chosen.update(lacking)
    pairs = list(zip(prompts, hashes, strict=True))
    return [prompt for prompt, each in pairs if each not in chosen], [
        prompt for prompt, each in pairs if each in chosen
    ]


def _kept(file: Path, kind: type[_T]) -> _T | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind) if file.is_file() else None
    except (OSError, msgspec.MsgspecError) as error:
        raise InputError(f"{file} is damaged ({error}): pass another folder as --work.") from error


# The target's states -------------------------------------------------------------------------------

_TARGET = "target.json"
_ELEMENT = 2
"""Bytes of a number of the states."""
_STATES_SHARE = 0.6
"""Of the time: when recording ends with what it has."""


def final_states(target: Target, answers: Answers) -> Iterator[np.ndarray]:
    """For each row the (slots, width) states behind the final norm."""
    for tokens, starts in zip(answers.tokens, answers.starts, strict=True):
        begins = np.unique(starts)
        ends = [*begins[1:], len(tokens)]
        texts = [mx.array(tokens[begin:end]) for begin, end in zip(begins, ends, strict=True)]
        yield np.concatenate([np.array(target.states(text).astype(mx.float32)) for text in texts])


class _Owner(msgspec.Struct):
    """The target whose answers and states a folder holds."""

    fingerprint: str
    folder: str


def claim(work: Path, target: Target) -> None:
    """Note in `work` whose answers it holds. Raises InputError if they are another target's."""
    path, fingerprint = work / _TARGET, target.fingerprint
    owner = _kept(path, _Owner)
    if owner is not None and owner.fingerprint == fingerprint:
        return
    if owner is not None and (answer_files(work) or answer_files(work / HELD_OUT)):
        raise InputError(
            f"{work} holds the answers of another target ({owner.folder}): pass that one as --target, or another "
            "folder as --work."
        )
    with whole_file(path) as unfinished:
        unfinished.write_bytes(msgspec.json.encode(_Owner(fingerprint, str(target.folder))))


def record_states(target: Target, work: Path, report: Report, over: Over = lambda _: False) -> None:
    """States of all shards, or of the rows that there is time for."""
    folders = work / HELD_OUT, work
    written = [(number, folder) for folder in folders for number in range(len(answer_files(folder)))]
    missing = [
        (folder, number)
        for number, folder in sorted(written, key=lambda each: each[0])
        if not states_path(folder, number).is_file()
    ]
    _require_space(work, missing, target.width)
    for done, (folder, number) in enumerate(missing):
        if number and over(_STATES_SHARE):
            break
        answers = read_answers(answers_path(folder, number))
        states = np.empty((*answers.tokens.shape, target.width), np.float16)
        for row, each in enumerate(final_states(target, answers)):
            states[row] = stored(each)
            share = done + (row + 1) / len(answers.tokens)
            report(TrainingProgress(stage="the target's states", done=share, total=len(missing)))
            if row + 1 >= len(TEMPERATURES) and over(_STATES_SHARE):
                states = states[: row + 1]
                break
        save_states(folder, number, states)


def _require_space(work: Path, missing: list[tuple[Path, int]], width: int) -> None:
    slots = sum(read_answers(answers_path(folder, number)).tokens.size for folder, number in missing)
    needed, free = slots * width * _ELEMENT, shutil.disk_usage(work).free
    if needed > free:
        raise InputError(
            f"The target's states take {needed / 1e9:.1f} GB ({slots:,} tokens x {width:,} numbers x {_ELEMENT} "
            f"bytes), and the disk of {work} has {free / 1e9:.1f} GB free: free space and start the same command "
            "again, or move this folder to a larger disk and pass it as --work."
        )
