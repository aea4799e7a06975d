"""Records a target's states of rows that it wrote. States that exist are kept. Knows no drafter."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

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
    state_outputs,
    stated_outputs,
    states_path,
    stored,
    whole_file,
)
from draft_worker.training.target import Target
from protocol.contracts.training import TrainingProgress
from protocol.errors import InputError
from protocol.inference.tap import LayerTap, proved_tap
from protocol.messages.features import FINAL

_TARGET = "target.json"
_ELEMENT = 2
"""Bytes of a number of the states."""
_STATES_SHARE = 0.6
"""Of the time: when recording ends with what it has."""


def tap_of(model: Any, folder: str) -> LayerTap:
    """Raises InputError for a target whose states can't be recorded."""
    tap = proved_tap(model)
    if tap is None:
        raise InputError(
            f"The states of {folder} can't be recorded, because its layers are no plain stack: choose another target."
        )
    return tap


def recorded(model: Any, tap: LayerTap, outputs: tuple[int, ...], answers: Answers) -> Iterator[np.ndarray]:
    """For each row the (slots, outputs, width) states. `outputs` ascending but for FINAL, which is the last."""
    order = sorted(outputs)
    places = [order.index(output) for output in outputs]
    tap.record(tuple(order))
    try:
        for tokens, starts in zip(answers.tokens, answers.starts, strict=True):
            begins = np.unique(starts)
            ends = [*begins[1:], len(tokens)]
            parts = [states_of(model, tap, tokens[begin:end]) for begin, end in zip(begins, ends, strict=True)]
            yield np.concatenate(parts).reshape(len(tokens), len(order), -1)[:, places]
    finally:
        tap.record(())


def states_of(model: Any, tap: LayerTap, tokens: np.ndarray) -> np.ndarray:
    """(tokens, outputs * width) float32 of one text, in the order of the outputs that the tap records."""
    model(mx.array(tokens)[None], cache=make_prompt_cache(model))
    found = tap.take()
    assert found is not None, "the tap records"
    return found.numbers


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


def record_states(
    target: Target, work: Path, outputs: tuple[int, ...], report: Report, over: Over = lambda _: False
) -> tuple[int, ...]:
    """States of all shards, or of the rows that there is time for, with these outputs at least and FINAL last. Returns
    which they hold.

    Raises InputError for a target without taps.
    """
    known = stated_outputs(work)
    if not set(outputs) <= set(known):
        known = (*sorted({*outputs, *known} - {FINAL}), FINAL)
    folders = work / HELD_OUT, work
    written = [(number, folder) for folder in folders for number in range(len(answer_files(folder)))]
    missing = [
        (folder, number)
        for number, folder in sorted(written, key=lambda each: each[0])
        if known != stated_outputs(folder) or not states_path(folder, number).is_file()
    ]
    if missing:
        _require_space(work, missing, len(known) * target.width)
    for folder in folders:
        state_outputs(folder, known)
    if not missing:
        return known
    tap = tap_of(target.model, str(target.folder))
    for done, (folder, number) in enumerate(missing):
        if number and over(_STATES_SHARE):
            break
        answers = read_answers(answers_path(folder, number))
        states = np.empty((*answers.tokens.shape, len(known), target.width), np.float16)
        for row, each in enumerate(recorded(target.model, tap, known, answers)):
            states[row] = stored(each)
            share = done + (row + 1) / len(answers.tokens)
            report(TrainingProgress(stage="the target's states", done=share, total=len(missing)))
            if row + 1 >= len(TEMPERATURES) and over(_STATES_SHARE):
                states = states[: row + 1]
                break
        save_states(folder, number, states)
    return known


def _require_space(work: Path, missing: list[tuple[Path, int]], elements: int) -> None:
    """`elements` of a slot. States of other outputs are removed first, so their space counts as free."""
    slots = sum(read_answers(answers_path(folder, number)).tokens.size for folder, number in missing)
    needed = slots * elements * _ELEMENT
    replaced = [states_path(folder, number) for folder, number in missing]
    free = shutil.disk_usage(work).free + sum(path.stat().st_size for path in replaced if path.is_file())
    if needed > free:
        raise InputError(
            f"The target's states take {needed / 1e9:.1f} GB ({slots:,} tokens x {elements:,} numbers x {_ELEMENT} "
            f"bytes), and the disk of {work} has {free / 1e9:.1f} GB free: free space and start the same command "
            "again, or move this folder to a larger disk and pass it as --work."
        )
