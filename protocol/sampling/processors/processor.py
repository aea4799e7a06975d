"""The interface of a logits processor. Knows no trees: the path to a node is given as its tokens."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, TypeAlias

import mlx.core as mx

from protocol.messages.sampling import Sampling
from protocol.messages.worker import Start
from protocol.sampling.grammar import Grammars

Paths: TypeAlias = Sequence[Sequence[int]]
"""For each row of logits, the tokens behind the root up to and with the row's node."""


class LogitsProcessor(ABC):
    """One change of the logits, for one sequence as of its root."""

    fields: ClassVar[tuple[str, ...]]
    """Names of the `Sampling` fields that this processor handles. No two processors share a field."""
    reads_paths: ClassVar[bool] = True
    """Whether what it does to a row depends on more than the row."""

    @classmethod
    @abstractmethod
    def wanted(cls, sampling: Sampling) -> bool:
        """Whether this processor can change the logits of such a request."""

    @abstractmethod
    def __init__(self, start: Start, grammars: Grammars) -> None:
        """`start`: the sampling and the tokens up to and with the root. May raise GrammarError."""

    def advance(self, tokens: Sequence[int]) -> None:
        """Move the root behind `tokens`; the last of them is the new root."""
        return

    @abstractmethod
    def apply(self, logits: mx.array, paths: Paths) -> mx.array:
        """(L, V) float32 to (L, V) float32. Row i depends only on `logits[i]` and `paths[i]`. Dropped tokens become
        -inf. May raise GrammarError."""

    def begin(self, logits: mx.array, paths: Paths) -> mx.array:
        """As `apply`, without waiting for the device: a row for which that has to wait becomes NaN."""
        return self.apply(logits, paths)

    def forced(self, path: Sequence[int]) -> int | None:
        """The only token that may follow `path`; None if several may, or if this processor does not know. May raise
        GrammarError."""
        return None
