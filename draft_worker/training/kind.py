"""What the training loop and the report ask of a kind of drafter."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from draft_worker.training.corpus.rows import Row
from draft_worker.training.target import Target
from protocol.contracts.training import DEPTHS, STALENESS

Judge: TypeAlias = Callable[[np.ndarray, mx.array], np.ndarray]
"""(n,) slots and the (n, head) logits of the tokens behind them, to (n,) bools: the guess is the target's token."""
CHAIN = STALENESS + DEPTHS - 1
"""Guesses behind one another that a report needs of a drafter that guesses one token at a time."""
NO_PLACE = -1


class TrainingSetting(NamedTuple):
    """What a kind is made of."""

    target: Target
    head_tokens: np.ndarray
    """(head,) ascending: the tokens that the drafter can guess."""
    outputs: tuple[int, ...]
    """That the rows' states hold, in this order."""
    unused: int
    """A token that the target has never, or hardly ever, written: the mask of a block."""
    layers: int
    """The user's choice; 0: the kind's own number."""


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

    @property
    def tables(self) -> tuple[str, ...]:
        """Parts of the names of tables of which a row reads few entries: they are no matrices to the optimiser."""
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
