"""Caches that fold tokens into a state: it is saved where a sequence may have to go back."""

from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from copy import copy, deepcopy
from typing import Any, Self

import mlx.core as mx
from mlx import utils

from protocol.inference.layer_cache import ForwardShape, LayerCache, densest

_flattened: Callable[[Any], list[tuple[str, Any]]] = vars(utils)["tree_flatten"]
_MOST_REMEMBERED = 4
"""States remembered beside the current one. A state of a large model takes tens of megabytes."""


class FoldingCache(LayerCache):
    """Folds tokens into a state, which can be cut back only to where `reach` says: to remembered states, or to nothing.

    It has no rows: its sequences are not exported to arenas or adopted from them.
    """

    def __init__(self, stock: Any) -> None:
        super().__init__(stock)
        self._stock: Any = stock
        self._end: int = 0
        """Tokens in the state."""
        self._remembered = {0: self._saved()}

    @property
    def given(self) -> Any:
        return self._stock

    @abstractmethod
    def _saved(self) -> Any:
        """The state, which no later forward changes."""

    @abstractmethod
    def _restore(self, state: Any) -> None:
        """Go on from a saved state, which stays as it is."""

    @abstractmethod
    def finish(self) -> None:
        """Called after each forward is built. Raises LookupError if the layer used the cache in an unknown way."""

    @abstractmethod
    def commit(self, slots: Sequence[int], surviving: Collection[int]) -> None:
        """Commit the tokens in these slots, in order; of the others, those in `surviving` slots stay."""

    def _states(self) -> dict[int, Any]:
        """States to go back to, by their tokens."""
        return self._remembered

    def reach(self, tokens: int) -> int:
        return max(each for each in (self._end, *self._states()) if each <= tokens)

    def cut(self, tokens: int) -> None:
        """Forget all but the first `tokens` tokens, a number that `reach` has given."""
        if tokens != self._end:
            self._restore(self._states()[tokens])
            self._end = tokens
        self._remembered = {each: state for each, state in self._remembered.items() if each <= tokens}

    def remember(self) -> None:
        """Let `reach` find the committed tokens so far, also after later forwards."""
        self._remembered[self._end] = self._saved()
        if len(self._remembered) > _MOST_REMEMBERED + 1:
            # The last two are where the next turn, and another conversation with the same rules, branch off.
            del self._remembered[densest(list(self._remembered)[:-1])]

    def shed(self) -> bool:
        """Let `reach` find one place less: the last one that was remembered goes last. Whether there was one."""
        places = [place for place in self._remembered if place]
        if places:
            del self._remembered[densest([0, *places]) if len(places) > 1 else places[0]]
        return bool(places)

    @property
    def places(self) -> set[int]:
        """The numbers of first tokens, above 0, to which it can be cut."""
        return {self._end, *self._states()} - {0}

    def state(self, tokens: int) -> Any:
        """The state behind so many tokens, one of `places`: a tree of lists and dicts, which no later forward
        changes."""
        return self._saved() if tokens == self._end else self._states()[tokens]

    def resume(self, tokens: int, state: Any) -> None:
        """In an empty cache: go on from what `state` gave."""
        self._restore(state)
        self._end = tokens
        self._remembered[tokens] = self._saved()

    @property
    def arrays(self) -> list[mx.array]:
        return _arrays(vars(self._stock))

    @property
    def memory(self) -> int:
        held = [*self.arrays, *(array for state in self._states().values() for array in _arrays(state))]
        return sum(array.nbytes for array in {id(array): array for array in held}.values())

    def copy(self, slots: int) -> Self:
        other = copy(self)
        other._remembered = dict(self._remembered)
        other._stock = copy(self._stock)
        other._restore(self._saved())
        return other


class StockCache(FoldingCache):
    """Any cache of mlx-lm, used as it is. It also goes back to the begin of the last forward. MLX copies an array when
    it is written to while a saved state holds it."""

    def __init__(self, stock: Any) -> None:
        super().__init__(stock)
        self.no_trees = f"its {type(stock).__name__} is used as it is"
        self._before = (0, self._remembered[0])
        """The tokens and the state before the last forward."""

    def prepare(self, forward: ForwardShape) -> None:
        assert forward.begin == self._end, "a state can't skip tokens"
        super().prepare(forward)
        self._before = (self._end, self._saved())
        self._end += forward.length

    def finish(self) -> None:
        """mlx-lm's own cache serves every use of its layer."""

    def commit(self, slots: Sequence[int], surviving: Collection[int]) -> None:
        """Every forward has folded its tokens already."""

    def move(self, begin: int, slots: mx.array) -> None:
        """No slot has contents of its own."""

    def cut(self, tokens: int) -> None:
        super().cut(tokens)
        if self._before[0] > tokens:
            self._before = (tokens, self._saved())

    def _states(self) -> dict[int, Any]:
        tokens, state = self._before
        return {**self._remembered, tokens: state}

    def _saved(self) -> Any:
        return deepcopy(self._stock.__dict__)

    def _restore(self, state: Any) -> None:
        # The layer's attention holds this object.
        self._stock.__dict__.update(deepcopy(state))


class ReplacedArrays(StockCache):
    """mlx-lm's ArraysCache. A layer replaces its arrays by new ones, so that saving them costs nothing."""

    def _saved(self) -> list[Any]:
        return list(self._stock.cache)

    def _restore(self, state: list[Any]) -> None:
        self._stock.cache = list(state)


def _arrays(state: Any) -> list[mx.array]:
    """All arrays in a saved state."""
    return [leaf for _, leaf in _flattened(state) if isinstance(leaf, mx.array)]
