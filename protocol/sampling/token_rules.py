"""The interface of what decides which tokens may follow, and the rules of any text."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

TokenMask = npt.NDArray[np.bool_]
"""(V,), true for the tokens that may follow."""


class TokenRules(Protocol):
    """The position of one sequence in its rules. Looks ahead along paths without moving."""

    vocabulary: int
    """Length of the masks."""

    @property
    def failure(self) -> str:
        """The reason why the generated tokens broke the rules; empty if they did not."""
        ...

    def advance(self, tokens: Sequence[int]) -> None:
        """Move behind these generated tokens. Sets `failure` if they are not allowed."""
        ...

    def allowed(self, paths: Sequence[Sequence[int]]) -> list[TokenMask | None]:
        """The mask of tokens that may follow each path from this position; None if the path has ended or is not
        allowed. The position does not change. Raises GrammarError."""
        ...


class AnyText:
    """All tokens may follow, up to the end."""

    failure = ""

    def __init__(self, vocabulary: int, ends: frozenset[int]) -> None:
        self.vocabulary = vocabulary
        self._mask = np.ones(vocabulary, dtype=np.bool_)
        self._ends = ends
        self._ended = False

    def advance(self, tokens: Sequence[int]) -> None:
        self._ended = self._ended or not self._ends.isdisjoint(tokens)

    def allowed(self, paths: Sequence[Sequence[int]]) -> list[TokenMask | None]:
        """As TokenRules has it."""
        return [self._mask if not self._ended and self._ends.isdisjoint(path) else None for path in paths]
