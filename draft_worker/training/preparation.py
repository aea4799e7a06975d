"""What a training needs before it begins: answers, states, the tokens of the head. Stages that exist are kept."""

import hashlib
import random
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import mlx.core as mx
import msgspec
import numpy as np

from draft_worker.training.answers import LONGEST_PROMPT, Prompt, Text, packed, texts
from draft_worker.training.rows import (
    Answers,
    answers_path,
    read_answers,
    save_answers,
    save_states,
    state_outputs,
    state_width,
    stated_outputs,
    states_path,
)
from draft_worker.training.states import recorded, tap_of
from draft_worker.training.target import Target
from protocol.contracts.training import TrainingChoices, TrainingProgress
from protocol.errors import InputError
from protocol.messages.features import FINAL

HELD_OUT = "held-out"
_HELD_OUT_SHARE = 40
"""One of so many prompts is never trained on."""

Report = Callable[[TrainingProgress], None]
"""May raise to end the process: what is unfinished then is written again."""


def write_answers(target: Target, prompts: Path | None, work: Path, choices: TrainingChoices, report: Report) -> None:
    """Shards in `work` with at least as many tokens of the target's own, and one of held-out prompts.

    Raises InputError if there are none and no prompts to write them for.
    """
    given = _read(prompts) if prompts is not None else []
    for folder, wanted, held_out in ((work / HELD_OUT, 1, True), (work, choices.tokens, False)):
        chosen = [prompt for prompt in given if _is_held_out(prompt) == held_out]
        written = sum(int(read_answers(path).own.sum()) for path in _shards(folder))
        if written >= wanted or (written and prompts is None):
            continue
        if len(chosen) < 2:
            raise InputError(
                "There are too few prompts to train and to measure a drafter with: pass files with some hundred of "
                "them as --data, or the folder of an earlier training's answers as --work."
            )
        stage = "answers to held-out prompts" if held_out else "answers"
        first = len(_shards(folder))
        mx.random.seed(first)
        # One source for all shards: of texts that are dropped at the end of one, most would be long.
        found = texts(target.model, _shuffled(chosen, first), target.ends)
        for number in count(first):
            begun = TrainingProgress(stage=stage, done=written, total=max(wanted, written), tokens=written)
            shard = _packed(found, choices, begun, report)
            save_answers(folder, number, shard)
            written += int(shard.own.sum())
            if written >= wanted:
                break


def record_states(target: Target, work: Path, outputs: tuple[int, ...], report: Report) -> tuple[int, ...]:
    """States of all shards, with these outputs at least and FINAL last. Returns which they hold.

    Raises InputError for states of another target, as far as their width tells, and for a target without taps.
    """
    if states_path(work, 0).is_file() and state_width(work) != target.width:
        raise InputError(f"{work} holds the states of another target: pass another folder as --work.")
    known = stated_outputs(work)
    if not set(outputs) <= set(known):
        known = (*sorted({*outputs, *known} - {FINAL}), FINAL)
    missing: list[tuple[Path, int]] = []
    for folder in (work / HELD_OUT, work):
        state_outputs(folder, known)
        missing += [(folder, number) for number in range(len(_shards(folder))) if _lacks(folder, number)]
    if not missing:
        return known
    tap = tap_of(target.model, str(target.folder))
    for done, (folder, number) in enumerate(missing):
        answers = read_answers(answers_path(folder, number))
        states = []
        for row, each in enumerate(recorded(target.model, tap, known, answers)):
            states.append(each)
            share = done + (row + 1) / len(answers.tokens)
            report(TrainingProgress(stage="the target's states", done=share, total=len(missing)))
        save_states(folder, number, np.stack(states))
    return known


def _lacks(folder: Path, number: int) -> bool:
    return not states_path(folder, number).is_file()


def _packed(found: Iterator[Text | None], choices: TrainingChoices, begun: TrainingProgress, report: Report) -> Answers:
    for step in packed(found, choices.rows, choices.slots):
        if isinstance(step, Answers):
            return step
        written = begun.tokens + step
        report(msgspec.structs.replace(begun, done=written, total=max(begun.total, written), tokens=written))
    raise AssertionError("a shard ends with itself")


def _shards(folder: Path) -> list[Path]:
    return sorted((folder / "answers").glob("shard-????.npz"))


def _read(path: Path) -> list[Prompt]:
    prompts = [msgspec.json.decode(line, type=list[list[int]]) for line in path.read_bytes().splitlines()]
    return [turns for turns in prompts if 0 < sum(map(len, turns)) <= LONGEST_PROMPT]


def _is_held_out(prompt: Prompt) -> bool:
    """By its tokens, so that neither the order nor further prompts change it."""
    digest = hashlib.sha256(msgspec.json.encode(prompt)).digest()
    return int.from_bytes(digest[:4], "big") % _HELD_OUT_SHARE == 0


def _shuffled(prompts: list[Prompt], seed: int) -> Iterator[Prompt]:
    """Endless; the same for the same seed."""
    rng = random.Random(seed)  # noqa: S311
    while True:
        yield from rng.sample(prompts, len(prompts))
