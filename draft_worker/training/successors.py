"""Makes the table of successors from what a target wrote: see `protocol.speculation.successors`."""

from collections.abc import Iterable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from draft_worker.training.rows import Answers
from protocol.speculation.successors import ANY, CERTAIN

_DISCOUNT = 0.75
"""Of each count: what was seen a few times is seen less often later (Ney, Essen and Kneser 1994)."""
_LEAST = 0.09
"""Probability below which no guess is worth a row of a forward."""
_SEEN_ONE, _SEEN_TWO = 2, 3
"""Times that the token, or both tokens, must have been seen."""
_SAME = 0.15
"""Two tokens have a row only where the guess is another one than that of the last alone, or is this much likelier."""
_LAST = (1 << 32) - 1
"""The part of a key of two tokens that is the last one."""
_Numbers: TypeAlias = npt.NDArray[np.int64]


def successors(written: Iterable[Answers]) -> bytes:
    """The table's file."""
    found = [_places(answers) for answers in written]
    before, last, following = (np.concatenate(column) for column in zip(*found, strict=True))
    ones, one_next, one_chance = _likeliest(last, following, _SEEN_ONE)
    likely = one_chance >= _LEAST
    ones, one_next, one_chance = ones[likely], one_next[likely], one_chance[likely]
    twos, two_next, two_chance = _likeliest((before << 32 | last)[before >= 0], following[before >= 0], _SEEN_TWO)
    if not len(ones):
        return b""
    place = np.minimum(np.searchsorted(ones, twos & _LAST), len(ones) - 1)
    known = ones[place] == twos & _LAST
    same = known & (one_next[place] == two_next) & (np.abs(one_chance[place] - two_chance) < _SAME)
    new = ~same & (known | (two_chance >= _LEAST))
    keys = np.concatenate([twos[new], ANY << 32 | ones])
    chances = np.concatenate([two_chance[new], one_chance])
    rows = np.stack([keys >> 32, keys & _LAST, np.concatenate([two_next[new], one_next]), chances * CERTAIN])
    return rows.T.astype("<u4").tobytes()


def _places(answers: Answers) -> tuple[_Numbers, _Numbers, _Numbers]:
    """For each token that the target wrote behind another one of the same text: the token two places before it, -1
    without one, that before it, and itself."""
    tokens, starts = answers.tokens.astype(np.int64), answers.starts
    rows, slots = np.nonzero(answers.own[:, 1:] & (starts[:, 1:] == starts[:, :-1]))
    slots += 1
    before = np.where(slots - 2 >= starts[rows, slots], tokens[rows, slots - 2], -1)
    return before, tokens[rows, slots - 1], tokens[rows, slots]


def _likeliest(keys: _Numbers, following: _Numbers, least: int) -> tuple[_Numbers, _Numbers, npt.NDArray[np.float64]]:
    """Each key that was seen `least` times, ascending, with its most frequent follower and that one's share."""
    if not len(keys):
        return keys, following, np.empty(0)
    pairs, counts = np.unique(np.stack([keys, following]), axis=1, return_counts=True)
    order = np.lexsort((counts, pairs[0]))
    ends = np.flatnonzero(np.diff(pairs[0][order], append=-1))
    seen = np.add.reduceat(counts[order], np.concatenate([[0], ends[:-1] + 1]))
    best, kept = order[ends], seen >= least
    return pairs[0][best][kept], pairs[1][best][kept], ((counts[best] - _DISCOUNT) / seen)[kept]
