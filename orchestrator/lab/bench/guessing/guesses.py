"""Asks an engine for guesses along a known text. Knows no processes and no files."""

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from draft_worker.engine import Batch, Engine, EngineSequence
from orchestrator.lab.bench.guessing.messages import TargetText
from protocol.contracts.training import DEPTHS
from protocol.messages.sampling import Sampling

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

STRIDE = 4
"""Every fourth token of an answer is a root."""
_TIMED = 8
"""Chains of guesses whose time is taken, in one text."""
_READ = 64


def hits(
    engine: Engine, text: TargetText, features: "NDArray[np.float32] | None", stale: int, vocabulary: int
) -> Iterator[list[bool]]:
    """For each root, whether each guess of a chain along the text is right: DEPTHS, or as many as the text has tokens.

    The features, (tokens, outputs * width), of the `stale` tokens before the root are not known yet; None for an engine
    that reads none. Guesses have the text's noise.
    """
    walk = _Walk(engine, text, features, stale, vocabulary)
    for root in range(text.prompt - 1, len(text.tokens) - 1, STRIDE):
        path, wanted = text.tokens[root : root + DEPTHS], text.tokens[root + 1 : root + 1 + DEPTHS]
        first = walk.advance(root)
        found = walk.sequence.evaluate(Batch((), path, [-1, *range(first, first + len(path) - 1)], 1))
        walk.sequence.keep([first], [])
        yield [list(each.tokens[:1]) == [token] for each, token in zip(found, wanted, strict=False)]
    walk.sequence.close()


def seconds_per_guess(
    engine: Engine,
    text: TargetText,
    features: "NDArray[np.float32] | None",
    vocabulary: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Of some chains of DEPTHS guesses: their time by guess, where each guess is one growth step."""
    walk = _Walk(engine, text, features, 0, vocabulary)
    taken = []
    for root in range(text.prompt - 1, len(text.tokens) - DEPTHS, STRIDE)[:_TIMED]:
        first = walk.advance(root)
        began, parent = clock(), -1
        for row, token in enumerate(text.tokens[root : root + DEPTHS], first):
            walk.sequence.evaluate(Batch((), [token], [parent], 1))
            parent = row
        taken.append((clock() - began) / DEPTHS)
        walk.sequence.keep([first], [])
    walk.sequence.close()
    return taken


def rates(chains: list[list[bool]]) -> tuple[float | None, ...]:
    """By depth: the share of right guesses where all guesses in front were right; None without such a place."""
    found: list[float | None] = []
    for depth in range(DEPTHS):
        alive = [chain[depth] for chain in chains if len(chain) > depth and all(chain[:depth])]
        found.append(sum(alive) / len(alive) if alive else None)
    return tuple(found)


class _Walk:
    """A sequence whose root moves along the text, with features as late as they are said to be."""

    sequence: EngineSequence

    def __init__(
        self, engine: Engine, text: TargetText, features: "NDArray[np.float32] | None", stale: int, vocabulary: int
    ) -> None:
        self.sequence = engine.open(Sampling(temperature=text.temperature, seed=text.seed), vocabulary)
        self._tokens = text.tokens
        self._features = features
        self._stale = stale
        self._fed = 0
        self._committed = 0

    def advance(self, root: int) -> int:
        """Commit the tokens before the root, and feed what is known of them. Returns the row of the root's node."""
        if missing := self._tokens[self._committed : root]:
            self.sequence.prefill(missing)
        self._feed(root - self._stale)
        # The root's own row will be kept.
        self._committed = root + 1
        return self.sequence.next_row

    def _feed(self, end: int) -> None:
        if self._features is not None and end > self._fed:
            self.sequence.feed(self._fed, self._features[self._fed : end])
            self._fed = end
            while self.sequence.unread:
                self.sequence.read(_READ)
