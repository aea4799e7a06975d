"""Calls of a package with states: the tokens of one path in, logits out. Knows no tree and no sampling."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from draft_worker.candidates.shortlist import GROUP_SIZE
from draft_worker.coreml.arrays import Array, Single
from draft_worker.coreml.runtime.tree_slots import HIDDEN
from draft_worker.coreml.stateful.layout import LOGITS, StatefulLayout
from draft_worker.coreml.stateful.runtimes import StatefulRuntime
from protocol.common_prefix import common_prefix
from protocol.errors import InputError


class PathCache:
    """The states of one sequence, and the tokens whose rows they hold."""

    def __init__(self, state: Any) -> None:
        self.state = state
        self.tokens: list[int] = []


class StatefulForward:
    """One package's calls. Core ML may release inputs on a thread of its own, so every array of a call is kept."""

    def __init__(self, layout: StatefulLayout, runtime: StatefulRuntime) -> None:
        self._layout = layout
        self._runtime = runtime
        longest = layout.lengths[-1] if layout.lengths else layout.most
        self._ids = np.zeros(longest, np.int32)
        self._mask = np.zeros(longest * layout.context, np.float32)
        self._inputs: dict[tuple[int, int], dict[str, Array]] = {}
        """Views of the two buffers by the tokens of a call and the length of its mask."""
        self._columns = -(-layout.vocabulary // GROUP_SIZE) * GROUP_SIZE

    def cache(self) -> PathCache:
        return PathCache(self._runtime.make_state())

    def run(self, cache: PathCache, path: Sequence[int], wanted: int) -> Single:
        """Make `cache` hold `path` (at most `context` tokens), with the calls that this takes.

        Returns the logits behind its last `wanted` tokens, (wanted, vocabulary padded with -inf); those tokens are
        evaluated, whether the cache holds them or not.
        """
        begin = min(common_prefix(cache.tokens, path), len(path) - wanted)
        rows = np.full((wanted, self._columns), -np.inf, np.float32)
        while begin < len(path):
            length = self._layout.length(len(path) - begin)
            # A call that takes more tokens than are left must not end behind the last slot.
            begin = max(0, min(begin, self._layout.context - length))
            end = min(begin + length, len(path))
            logits = self._call(cache, path[begin:end], begin, length)
            first = max(begin, len(path) - wanted)
            place = first - (len(path) - wanted)
            rows[place : place + max(0, end - first), : self._layout.vocabulary] = logits[first - begin : end - begin]
            begin = end
        return rows

    def _call(self, cache: PathCache, tokens: Sequence[int], begin: int, length: int) -> Array:
        """(length, vocabulary) logits of `tokens`, which the cache then holds at `begin`."""
        data = self._views(length, begin + length)
        self._ids[: len(tokens)] = tokens
        self._ids[len(tokens) : length] = tokens[-1]
        mask = data[self._layout.mask][0, 0]
        mask[:, : begin + 1] = 0
        mask[:, begin + 1 :] = np.triu(np.full((length, length - 1), HIDDEN, np.float32))
        del cache.tokens[begin:]
        outputs = self._runtime.predict(data, cache.state)
        cache.tokens += tokens
        return self._checked(outputs, length)

    def _views(self, length: int, end: int) -> dict[str, Array]:
        if (length, end) not in self._inputs:
            self._inputs[length, end] = {
                self._layout.ids: self._ids[:length].reshape(1, length),
                self._layout.mask: self._mask[: length * end].reshape(1, 1, length, end),
            }
        return self._inputs[length, end]

    def _checked(self, outputs: Mapping[str, Array], length: int) -> Array:
        logits = outputs.get(LOGITS)
        wanted = (1, length, self._layout.vocabulary)
        if logits is None or logits.shape != wanted:
            got = "nothing" if logits is None else str(logits.shape)
            raise InputError(f"The package returned logits of {got}, not {wanted}: draft with another model.")
        return logits[0]
