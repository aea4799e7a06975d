"""Places of a row from which a chain of guesses begins, and how far each goes."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import mlx.core as mx
import numpy as np

from draft_worker.training.rows import Row
from protocol.contracts.training import DEPTHS, STALENESS

Judge: TypeAlias = Callable[[np.ndarray, mx.array], np.ndarray]
"""(n,) slots and the (n, head) logits of the tokens behind them, to (n,) bools: the guess is the target's token."""
CHAIN = STALENESS + DEPTHS - 1
"""Guesses behind one another that a report needs."""
NO_PLACE = -1
UNROLLED = 0.5
"""Share of the chains that go on behind their first guess."""
GIVEN = 0.15
"""Share of the places in prompts that count: the draft reads them, and need not guess them."""


class Chains(NamedTuple):
    """Chains, the longest first, so that those that are still going are the first ones."""

    places: np.ndarray
    lengths: np.ndarray
    """Guesses of each."""

    @property
    def steps(self) -> int:
        return int(self.lengths[0]) if len(self.lengths) else 0

    def at(self, step: int) -> np.ndarray:
        """Places of the chains that make guess `step`, counted from 0."""
        return self.places[: int((self.lengths > step).sum())]

    def guessed(self) -> np.ndarray:
        """The slots behind which something is guessed, ascending."""
        return np.unique(np.concatenate([self.at(step) + step for step in range(self.steps)]))

    def slots(self, step: int) -> np.ndarray:
        """Those of guess `step`."""
        return self.at(step) + step


def columns(places: np.ndarray, lengths: np.ndarray) -> tuple[Chains, np.ndarray]:
    """Chains in order, and for each its index in `places`."""
    order = np.argsort(-lengths, kind="stable")
    return Chains(places[order], lengths[order]), order


def drawn(row: Row, random: np.random.Generator) -> Chains:
    """Chains behind every token with a feature in front: from all places that the target goes on from, and some others.

    Half of them make one guess, the others as many as an asynchronous draft makes between two features (0 to 8 tokens
    without features).
    """
    places = counted(row, random)
    places = places[places > row.starts[places]]
    lengths = np.where(random.random(len(places)) < UNROLLED, random.integers(2, STALENESS + 1, len(places)), 1)
    return columns(places, np.minimum(lengths, np.maximum(1, reach(row)[places])))[0]


def counted(row: Row, random: np.random.Generator) -> np.ndarray:
    """Places that count in a loss, ascending."""
    inside = np.zeros(len(row.tokens), bool)
    inside[:-1] = row.starts[1:] == row.starts[:-1]
    return np.flatnonzero(row.wanted | (inside & (random.random(len(row.tokens)) < GIVEN)))


def whole(row: Row, places: np.ndarray) -> tuple[Chains, np.ndarray]:
    """Chains of a report, as long as it wants them; none at the first token of a text, which has no feature in front.

    With the index of each in `places`.
    """
    lengths = np.where(places > row.starts[places], np.minimum(reach(row)[places], CHAIN), 0)
    return columns(places, lengths)


def reach(row: Row) -> np.ndarray:
    """(slots,): how many places from this one on, without a gap, have a next token that the target wrote."""
    lengths = np.zeros(len(row.wanted) + 1, np.int32)
    for slot in range(len(row.wanted) - 1, -1, -1):
        lengths[slot] = lengths[slot + 1] + 1 if row.wanted[slot] else 0
    return lengths[:-1]


def windows(chain: np.ndarray) -> np.ndarray:
    """(places, CHAIN) hits of chains, as (places, STALENESS, DEPTHS): staleness and depth count alike."""
    return np.stack([chain[:, stale : stale + DEPTHS] for stale in range(STALENESS)], 1)


def no_hits(places: np.ndarray) -> np.ndarray:
    return np.full((len(places), CHAIN), NO_PLACE, np.int8)
