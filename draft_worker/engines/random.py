"""The MLX draft with its tokens replaced by random ones: measures the cost of a useless draft."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from draft_worker.engine_interface import Batch
from draft_worker.engines.mlx import MlxEngine, MlxSequence
from draft_worker.short_head import HeadTokens
from protocol.contracts.engines import EngineDeclaration
from protocol.inference.language_model import LanguageModel
from protocol.speculation.token_tree import Candidates
from protocol.worker.process import WorkerSetup

ENGINE = EngineDeclaration(help="guesses blindly at the cost of mlx, for measurements", model="checkpoint", hidden=True)


def load(setup: WorkerSetup) -> "RandomEngine":
    """Raises InputError if the folder holds no model that can serve."""
    return RandomEngine.load(Path(setup.model))


class RandomEngine(MlxEngine):
    """Tokens are drawn uniformly, the same ones for a seed. Cost and probabilities are those of the model."""

    name = "random"

    def __init__(self, model: LanguageModel, tokenizer: str, head: HeadTokens | None = None, seed: int = 0) -> None:
        super().__init__(model, tokenizer, head)
        self._source = np.random.default_rng(seed)

    def evaluate_together(self, parts: Sequence[tuple[MlxSequence, Batch]]) -> list[list[Candidates]]:
        return [
            [Candidates(self._different(len(each.tokens), sequence), each.probabilities) for each in candidates]
            for (sequence, _), candidates in zip(parts, super().evaluate_together(parts), strict=True)
        ]

    def _different(self, count: int, sequence: MlxSequence) -> list[int]:
        """`count` different tokens that both draft and target know."""
        return self._source.choice(sequence.columns.head.shared, size=count, replace=False).tolist()
