"""Which tokens a drafter with the whole vocabulary learns to guess, and which only to leave out."""

import math
from pathlib import Path

import mlx.core as mx
import numpy as np

from draft_worker.training.target import Target
from protocol.contracts.model_folder import HEAD_TOKENS

_OTHERS = 2048


class Guessable:
    """The tokens of the head, and in each row of training a sample of all others.

    A published format has the whole vocabulary, whose softmax takes long. The others are drawn at random, and count as
    many times as they are rarer drawn (sampled softmax: Jean et al. 2015, arXiv 1412.2007).
    """

    def __init__(self, target: Target, tokens: np.ndarray, others: int = _OTHERS) -> None:
        """`others`: how many of the others a row draws; 0 for a format with a head of its own."""
        self.tokens = mx.array(tokens)
        rest = np.ones(target.vocabulary, bool)
        rest[tokens] = False
        self._others = np.flatnonzero(rest)
        self._count = min(others, len(self._others))

    def drawn(self, random: np.random.Generator) -> tuple[mx.array, mx.array]:
        """Tokens, and what to add to their logits."""
        count = self._count
        if not count:
            return self.tokens, mx.zeros(self.tokens.shape)
        chosen = random.choice(self._others, count, replace=False)
        more = mx.full((count,), math.log(len(self._others) / count))
        return mx.concatenate([self.tokens, mx.array(chosen)]), mx.concatenate([mx.zeros(self.tokens.shape), more])

    def write(self, folder: Path) -> None:
        """Write the tokens beside a drafter, whose engine then computes no others' logits."""
        np.save(folder / HEAD_TOKENS, np.array(self.tokens).astype(np.int32))
