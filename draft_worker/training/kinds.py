"""The kinds of drafter that can be trained, and what the training loop and the report ask of one."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from draft_worker.training import eagle3, language
from draft_worker.training.chains import Judge
from draft_worker.training.rows import Row
from draft_worker.training.target import Target
from protocol.contracts.training import TrainedKind


class Training(Protocol):
    """A drafter in training."""

    @property
    def network(self) -> nn.Module:
        """Its trainable parameters are what training changes."""
        ...

    @property
    def parameters_per_guess(self) -> int:
        """Parameters that a chain of guesses reads, by guess."""
        ...

    def loss(self, row: Row, random: np.random.Generator) -> mx.array:
        """A scalar; 0 if nothing in the row counts."""
        ...

    def hits(self, row: Row, places: np.ndarray, judge: Judge) -> np.ndarray:
        """(places, STALENESS, DEPTHS) int8: 1 the guess is right, 0 wrong, NO_PLACE where none is wanted.

        Guess (s, d) of place p is the token behind slot p + s + d, while the tokens before p have features, and the
        tokens in front of the guess are the target's own.
        """
        ...

    def write(self, folder: Path) -> None:
        """The drafter in its published format."""
        ...


class Kind(NamedTuple):
    """How a kind of drafter is trained."""

    outputs: Callable[[Target, int], tuple[int, ...]]
    """With the user's choice of layers: the target's outputs that it reads besides FINAL. Raises InputError if the
    kind can't be trained so."""
    training: Callable[[Target, np.ndarray, tuple[int, ...], int], Training]
    """Of a target, (head,) ascending tokens that the drafter can guess, the outputs that the rows' states hold, in this
    order, and the user's choice of layers (0: the kind's own number)."""


KINDS: Mapping[TrainedKind, Kind] = MappingProxyType(
    {
        "eagle3": Kind(eagle3.outputs, eagle3.Eagle3Training),
        "lm": Kind(lambda *_: (), language.LanguageTraining),
    }
)
