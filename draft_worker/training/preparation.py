"""What a training needs before it begins: answers, states, the tokens of the head. Stages that exist are kept."""

import hashlib
import json
import random
import shutil
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import mlx.core as mx
import msgspec
import numpy as np

from draft_worker.training.answers import Prompt, Text, packed, texts
from draft_worker.training.rows import (
    Answers,
    answers_path,
    halved,
    read_answers,
    save_answers,
    save_states,
    state_outputs,
    stated_outputs,
    states_path,
)
from draft_worker.training.states import recorded, tap_of
from draft_worker.training.target import Target
from draft_worker.training.whole_file import whole
from protocol.contracts.training import TrainingChoices, TrainingProgress
from protocol.errors import InputError
from protocol.messages.features import FINAL

HELD_OUT = "held-out"
_OWNER = "target.json"
_HELD_OUT_SHARE = 40
"""One of so many prompts is never trained on."""

Report = Callable[[TrainingProgress], None]
"""May raise to end the process: what is unfinished then is written again."""


def claim(work: Path, fingerprint: str) -> None:
    """Note whose answers and states `work` holds. Raises InputError if they are another target's."""
    path = work / _OWNER
    if not path.is_file():
        with whole(path) as unfinished:
            unfinished.write_text(json.dumps({"target": fingerprint}))
    elif json.loads(path.read_bytes()) != {"target": fingerprint}:
        raise InputError(f"{work} holds the answers of another target: pass another folder as --work.")


def write_answers(target: Target, prompts: Path | None, work: Path, choices: TrainingChoices, report: Report) -> None:
    """Shards in `work` with at least as many tokens of the target's own, and one of held-out prompts.

    Raises InputError if there are none and no prompts to write them for.
    """
    given = _read(prompts) if prompts is not None else []
    apart = _held_out(given)
    for folder, wanted, held_out in ((work / HELD_OUT, 1, True), (work, choices.tokens, False)):
        chosen = [prompt for prompt in given if (_digest(prompt) in apart) == held_out]
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

    Raises InputError for a target without taps, and if the disk has no room for them.
    """
    known = stated_outputs(work)
    if not set(outputs) <= set(known):
        known = (*sorted({*outputs, *known} - {FINAL}), FINAL)
    missing: list[tuple[Path, int]] = []
    for folder in (work / HELD_OUT, work):
        state_outputs(folder, known)
        missing += [(folder, number) for number in range(len(_shards(folder))) if _lacks(folder, number)]
    if not missing:
        return known
    _require_room(missing, len(known) * target.width)
    tap = tap_of(target.model, str(target.folder))
    for done, (folder, number) in enumerate(missing):
        answers = read_answers(answers_path(folder, number))
        states: list[np.ndarray] = []
        for row, each in enumerate(recorded(target.model, tap, known, answers)):
            states.append(halved(each))
            share = done + (row + 1) / len(answers.tokens)
            report(TrainingProgress(stage="the target's states", done=share, total=len(missing)))
        save_states(folder, number, np.stack(states))
    return known


def _require_room(missing: list[tuple[Path, int]], elements: int) -> None:
    """`elements`: of a token's states."""
    tokens = sum(read_answers(answers_path(*shard)).tokens.size for shard in missing)
    needed, free = 2 * elements * tokens, shutil.disk_usage(missing[0][0]).free
    if needed > free:
        raise InputError(
            f"The target's states of {tokens:,} tokens take {needed / 1e9:.1f} GB ({2 * elements / 1e3:.0f} kB each), "
            f"and the disk of {missing[0][0]} has {free / 1e9:.1f} GB free: free some, or pass a --work on another "
            "disk."
        )


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
    return [msgspec.json.decode(line, type=list[list[int]]) for line in path.read_bytes().splitlines()]


def _held_out(prompts: list[Prompt]) -> set[int]:
    """Digests of those to examine with. The tokens decide, so that neither the order nor further prompts change it;
    of few prompts at least two."""
    digests = sorted({_digest(prompt) for prompt in prompts})
    return {digest for digest in digests if digest % _HELD_OUT_SHARE == 0} | set(digests[:2])


def _digest(prompt: Prompt) -> int:
    return int.from_bytes(hashlib.sha256(msgspec.json.encode(prompt)).digest()[:8], "big")


def _shuffled(prompts: list[Prompt], seed: int) -> Iterator[Prompt]:
    """Endless; the same for the same seed."""
    rng = random.Random(seed)  # noqa: S311
    while True:
        yield from rng.sample(prompts, len(prompts))
