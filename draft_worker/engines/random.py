"""The draft on MLX with its tokens replaced by random ones: what a useless draft costs."""

from collections.abc import Sequence

import numpy as np

from draft_worker.engine import Batch, Engine
from draft_worker.engines import mlx
from draft_worker.wrapped_engine import WrappedEngine, WrappedSequence
from protocol.contracts.engines import EngineDeclaration
from protocol.speculation.candidates import Candidates
from protocol.worker.process import WorkerSetup

ENGINE = EngineDeclaration(help="guesses blindly at the cost of mlx, for measurements", model="checkpoint", hidden=True)


def load(setup: WorkerSetup) -> "RandomEngine":
    """Raises InputError if the folder holds no model that can serve."""
    return RandomEngine(mlx.load(setup))


class RandomEngine(WrappedEngine):
    """Evaluates all that `inner` evaluates and states its probabilities, but for tokens that are drawn uniformly.

    So it takes as much from the target's device as `inner` does, and is as sure of its guesses.
    """

    def __init__(self, inner: Engine, seed: int = 0) -> None:
        super().__init__(inner)
        self.name = "random"
        self._source = np.random.default_rng(seed)

    def evaluate_together(self, asked: Sequence[tuple[WrappedSequence, Batch]]) -> list[list[Candidates]]:
        """Without the distributions that the tokens were not drawn from: such guesses count as certain."""
        return [
            [
                Candidates(self._different(len(found.tokens), sequence.vocabulary), found.probabilities)
                for found in candidates
            ]
            for (sequence, _), candidates in zip(asked, super().evaluate_together(asked), strict=True)
        ]

    def _different(self, count: int, vocabulary: int) -> list[int]:
        """`count` tokens, no two alike, that a target of `vocabulary` tokens knows."""
        return self._source.choice(min(vocabulary, self.vocabulary), size=count, replace=False).tolist()
