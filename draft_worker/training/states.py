"""Records a target's states of rows that it wrote. States that exist are kept. Knows no drafter."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import msgspec
import numpy as np

from draft_worker.training.rows import (
    HELD_OUT,
    TEMPERATURES,
    Answers,
    Over,
    Report,
    answer_files,
    answers_path,
    read_answers,
    save_states,
    states_path,
    stored,
    whole_file,
)
from draft_worker.training.target import Target
from protocol.contracts.training import TrainingProgress
from protocol.errors import InputError

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
    owner = _owner(path)
    if owner is not None and owner.fingerprint == fingerprint:
        return
    if owner is not None and (answer_files(work) or answer_files(work / HELD_OUT)):
        raise InputError(
            f"{work} holds the answers of another target ({owner.folder}): pass that one as --target, or another "
            "folder as --work."
        )
    with whole_file(path) as unfinished:
        unfinished.write_bytes(msgspec.json.encode(_Owner(fingerprint, str(target.folder))))


def _owner(path: Path) -> _Owner | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Owner) if path.is_file() else None
    except (OSError, msgspec.MsgspecError) as error:
        raise InputError(f"{path} is damaged ({error}): pass another folder as --work.") from error


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
