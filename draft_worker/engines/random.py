"""The MLX draft with its tokens replaced by random ones: measures the cost of a useless draft."""

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
    """Evaluates what `inner` evaluates and states the probabilities of `inner`, for tokens that are drawn uniformly.

    It therefore loads the target's device as `inner` does, and claims as much for its guesses.
    """

    def __init__(self, inner: Engine, seed: int = 0) -> None:
        super().__init__(inner)
        self.name = "random"
        self._source = np.random.default_rng(seed)

    def evaluate_together(self, parts: Sequence[tuple[WrappedSequence, Batch]]) -> list[list[Candidates]]:
        """States no distributions, because the tokens were drawn from none: rejection treats them as certain."""
        return [
            [
                Candidates(self._different(len(found.tokens), sequence.vocabulary), found.probabilities)
                for found in candidates
            ]
            for (sequence, _), candidates in zip(parts, super().evaluate_together(parts), strict=True)
        ]

    def _different(self, count: int, vocabulary: int) -> list[int]:
        """`count` different tokens that a target of `vocabulary` tokens knows."""
        return self._source.choice(min(vocabulary, self.vocabulary), size=count, replace=False).tolist()
