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
    """Runs `inner` and replaces its tokens by uniformly drawn ones. Cost and probabilities are those of `inner`."""

    def __init__(self, inner: Engine, seed: int = 0) -> None:
        super().__init__(inner)
        self.name = "random"
        self._source = np.random.default_rng(seed)

    def evaluate_together(self, parts: Sequence[tuple[WrappedSequence, Batch]]) -> list[list[Candidates]]:
        """Candidates without distributions: rejection sampling treats such guesses as certain."""
        return [
            [
                Candidates(self._different(len(found.tokens), sequence.vocabulary), found.probabilities)
                for found in candidates
            ]
            for (sequence, _), candidates in zip(parts, super().evaluate_together(parts), strict=True)
        ]

    def _different(self, count: int, vocabulary: int) -> list[int]:
        """`count` different tokens below `vocabulary`, the size of the target's vocabulary."""
        return self._source.choice(min(vocabulary, self.vocabulary), size=count, replace=False).tolist()
