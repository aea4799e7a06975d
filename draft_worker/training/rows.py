"""Rows of text that the target wrote, with its states: their files, and the order in which training reads them.

A folder holds answers/shard-XXXX.npz and final-states/shard-XXXX.npy.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Self, TypeAlias

import numpy as np

from protocol.contracts.training import TrainingProgress
from protocol.errors import InputError, PipelineError
from protocol.security.private_files import replacing

HELD_OUT = "held-out"
"""The folder in a work folder of what is never trained on."""
TEMPERATURES = (0.0, 0.7, 1.0)
"""Of the answers that a target writes: a third of the rows each."""
Over: TypeAlias = Callable[[float], bool]
"""Whether this share of the time has passed."""
Report: TypeAlias = Callable[[TrainingProgress], None]
"""May raise to end the process: what is unfinished then is written again."""
_ANSWERS, _STATES = "answers", "final-states"
_LARGEST = 65_000.0
"""Of an fp16 number; residual streams in bf16 may be larger."""


class Answers(NamedTuple):
    """Rows of slots, filled with one text behind another."""

    tokens: np.ndarray
    """(rows, slots) int32"""
    own: np.ndarray
    """(rows, slots) bool: the target wrote the token."""
    starts: np.ndarray
    """(rows, slots) int32: the slot in which the token's text begins."""
    temperatures: np.ndarray
    """(rows,) float32: at which the target wrote."""

    @classmethod
    def blank(cls, temperatures: Sequence[float], slots: int) -> Self:
        shape = len(temperatures), slots
        tokens, own, starts = np.zeros(shape, np.int32), np.zeros(shape, bool), np.zeros(shape, np.int32)
        return cls(tokens, own, starts, np.array(temperatures, np.float32))

    def put(self, row: int, begin: int, tokens: Sequence[int] | np.ndarray, own: Sequence[bool] | np.ndarray) -> int:
        """A text from the slot `begin` on, cut at the row's end. The slot behind it."""
        end = min(self.tokens.shape[1], begin + len(tokens))
        self.tokens[row, begin:end] = tokens[: end - begin]
        self.own[row, begin:end] = own[: end - begin]
        self.starts[row, begin:end] = begin
        self.starts[row, end:] = end
        return end


class Row(NamedTuple):
    """One row, with the target's states."""

    tokens: np.ndarray
    starts: np.ndarray
    wanted: np.ndarray
    """(slots,) bool: the target wrote the token behind this one, and that token is in the row."""
    temperature: float
    states: np.ndarray
    """(slots, width) float32: behind the final norm."""


class Shards:
    """A folder of shards, of which those with states are read. Files are mapped, not loaded."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.answers: list[Answers] = []
        self._states: list[np.ndarray] = []
        self.refresh()

    def refresh(self) -> int:
        """Open the shards that have appeared; returns how many there are in all."""
        while (path := states_path(self._folder, len(self._states))).is_file():
            self.answers.append(read_answers(answers_path(self._folder, len(self._states))))
            self._states.append(np.load(path, mmap_mode="r"))
        return len(self._states)

    def count(self, shards: int) -> int:
        """Rows of the first `shards` shards."""
        return sum(map(len, self._states[:shards]))

    def row(self, number: int) -> Row:
        """The row of this number, counted over all shards. The last rows of a shard may have no states: they do not
        count."""
        for answers, states in zip(self.answers, self._states, strict=True):
            if number < len(states):
                return _row(answers, states, number)
            number -= len(states)
        raise IndexError(number)

    def written(self, vocabulary: int) -> np.ndarray:
        """(vocabulary,): how often the target wrote each token."""
        counts = np.zeros(vocabulary, np.int64)
        for each in self.answers:
            counts += np.bincount(each.tokens[each.own], minlength=vocabulary)
        return counts


def _row(answers: Answers, states: np.ndarray, number: int) -> Row:
    tokens, starts, own = answers.tokens[number], answers.starts[number], answers.own[number]
    wanted = np.zeros(len(tokens), bool)
    wanted[:-1] = own[1:] & (starts[1:] == starts[:-1])
    temperature = round(float(answers.temperatures[number]), 3)
    return Row(tokens, starts, wanted, temperature, np.asarray(states[number], np.float32))


def answers_path(folder: Path, shard: int) -> Path:
    return folder / _ANSWERS / f"shard-{shard:04d}.npz"


def states_path(folder: Path, shard: int) -> Path:
    return folder / _STATES / f"shard-{shard:04d}.npy"


def answer_files(folder: Path) -> list[Path]:
    """Files of answers in `folder`, in order."""
    return sorted((folder / _ANSWERS).glob("shard-????.npz"))


def read_answers(path: Path) -> Answers:
    """Raises InputError for a file that is none."""
    try:
        with np.load(path) as file:
            return Answers(
                file["tokens"].astype(np.int32),
                file["own"].astype(bool),
                file["starts"].astype(np.int32),
                file["temperatures"].astype(np.float32),
            )
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{path} is damaged ({error}): delete it, and start the command again.") from error


def save_answers(folder: Path, shard: int, answers: Answers) -> None:
    """Raises PipelineError if it can't be written."""
    with whole_file(answers_path(folder, shard)) as unfinished:
        np.savez(unfinished, **answers._asdict())


def stored(states: np.ndarray) -> np.ndarray:
    """States as files hold them, in fp16."""
    return np.clip(states, -_LARGEST, _LARGEST).astype(np.float16)


def save_states(folder: Path, shard: int, states: np.ndarray) -> None:
    """`states` (rows, slots, width), as `stored` gives them. Raises PipelineError if it can't be written."""
    with whole_file(states_path(folder, shard)) as unfinished:
        np.save(unfinished, states)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A path to write, which becomes `path` at the end, for this user alone: a training keeps prompts and answers.
    Nothing stays of a file that could not be written.

    Raises PipelineError naming `path`. MLX raises RuntimeError where others raise OSError, so the contents must be
    computed before.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with replacing(path, path.with_suffix(f".unfinished{path.suffix}")) as unfinished:
            yield unfinished
    except (OSError, RuntimeError) as error:
        raise PipelineError(
            f"{path} could not be written ({error}): free space on its disk, and start the same command again."
        ) from error
