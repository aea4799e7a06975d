"""Any engine with its tokens replaced by random ones: what a useless draft costs. Imports no MLX."""

from collections.abc import Iterable, Sequence

import numpy as np

from draft_worker.engine import Batch, Engine, EngineSequence
from protocol.messages.sampling import Sampling
from protocol.speculation.candidates import Candidates


class RandomEngine:
    """Computes all that `inner` computes and claims what it claims, so that it is in the way just as much
    and lies as boldly; but the tokens it names are drawn uniformly from the vocabulary."""

    def __init__(self, inner: Engine, seed: int = 0) -> None:
        self.name = "random"
        self.model = inner.model
        self.architecture = inner.architecture
        self.vocabulary = inner.vocabulary
        self.context = inner.context
        self.device = inner.device
        self.tokenizer = inner.tokenizer
        self._inner = inner
        self._source = np.random.default_rng(seed)

    def open(self, sampling: Sampling, vocabulary: int) -> "RandomSequence":
        return RandomSequence(self._inner.open(sampling, vocabulary), min(vocabulary, self.vocabulary), self._source)


class RandomSequence:
    """The inner engine's sequence in everything but the tokens it proposes."""

    def __init__(self, inner: EngineSequence, vocabulary: int, source: np.random.Generator) -> None:
        self.path_tokens = inner.path_tokens
        self._inner = inner
        self._vocabulary = vocabulary
        self._source = source

    @property
    def committed(self) -> int:
        return self._inner.committed

    @property
    def next_row(self) -> int:
        return self._inner.next_row

    def prefill(self, tokens: Sequence[int]) -> None:
        self._inner.prefill(tokens)

    def evaluate(self, batch: Batch) -> list[Candidates]:
        """Without the distributions that the tokens were not drawn from: such guesses count as certain."""
        return [
            Candidates(self._different(len(found.tokens)), found.probabilities) for found in self._inner.evaluate(batch)
        ]

    def keep(self, path: Sequence[int], surviving: Iterable[int]) -> None:
        self._inner.keep(path, surviving)

    def truncate(self, length: int) -> None:
        self._inner.truncate(length)

    @property
    def memory(self) -> int:
        return self._inner.memory

    @property
    def copyable(self) -> bool:
        return self._inner.copyable

    def again(self, length: int, sampling: Sampling, vocabulary: int, *, free: bool) -> "RandomSequence":
        inner = self._inner.again(length, sampling, vocabulary, free=free)
        return RandomSequence(inner, min(vocabulary, self._vocabulary), self._source)

    def _different(self, count: int) -> list[int]:
        """So many tokens, no two alike."""
        return self._source.choice(self._vocabulary, size=count, replace=False).tolist()
