"""Times forwards of one random model by mlx-lm and by us, in turns."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import make_prompt_cache

from orchestrator.lab.bench.forward_comparison.messages import (
    Built,
    ComparisonOrder,
    ComparisonReport,
    LayerKind,
    Sampled,
)
from orchestrator.lab.bench.forward_comparison.random_models import random_network, same_network
from protocol.inference.language_model import LanguageModel
from protocol.inference.slots import PREFIX
from protocol.messages.base import Level


class StockSequence:
    """Forwards behind one context."""

    def __init__(self, network: Any, context: Sequence[int]) -> None:
        self._network = network
        self._caches = make_prompt_cache(network)
        self._written = 0
        """Tokens behind the context."""
        mx.eval(network(mx.array([list(context)]), cache=self._caches))
        # A cache that can be trimmed now is trimmed later; the others get a copy of what they hold now.
        self._saved = [None if cache.is_trimmable() else _copied(vars(cache)) for cache in self._caches]

    def evaluate(self, tokens: Sequence[int]) -> mx.array:
        """(L, V) logits, not yet computed."""
        self._written += len(tokens)
        return self._network(mx.array([list(tokens)]), cache=self._caches)[0]

    def undo(self) -> None:
        """Return to the context; computed on return."""
        for cache, saved in zip(self._caches, self._saved, strict=True):
            if saved is None:
                cache.trim(self._written)
            else:
                vars(cache).update(_copied(saved))
        self._written = 0


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    """In memory of its own, which a forward may overwrite."""
    copied = tree_map(lambda leaf: leaf + mx.zeros((), leaf.dtype) if isinstance(leaf, mx.array) else leaf, state)
    mx.eval(copied)
    return copied


class OurSequence:
    """Forwards behind one context."""

    def __init__(self, model: LanguageModel, context: Sequence[int]) -> None:
        self._sequence = model.sequence()
        self._sequence.prefill(context)
        self._context = len(context)
        self._first = 0
        """Number of the first row of the last forward."""

    def chain(self, tokens: Sequence[int]) -> mx.array:
        """(L, V) logits, not yet computed."""
        return self._evaluated(tokens, range(-1, len(tokens) - 1))

    def tree(self, tokens: Sequence[int]) -> mx.array:
        """(L, V) logits, not yet computed, of a balanced binary tree."""
        return self._evaluated(tokens, [(row - 1) // 2 for row in range(len(tokens))])

    def keep(self, rows: int) -> None:
        """Commit the first of the last chain's rows, drop the others; computed on return."""
        self._sequence.keep(range(self._first, self._first + rows), ())
        mx.eval([cache.arrays for cache in self._sequence.caches])

    def undo(self) -> None:
        """Return to the context."""
        self._sequence.truncate(self._context)

    def _evaluated(self, tokens: Sequence[int], parents: Sequence[int]) -> mx.array:
        """A parent is an index among the tokens, or -1."""
        self._first = self._sequence.next_row
        return self._sequence.evaluate(tokens, [self._first + row if row >= 0 else PREFIX for row in parents])


Clock = Callable[[], float]
"""Seconds."""
Forward = Callable[[Sequence[int]], mx.array]


def compare(kind: LayerKind, order: ComparisonOrder, clock: Clock) -> Iterator[ComparisonReport]:
    """Reports of one kind. The first sample warms up and is not reported."""
    network = random_network(kind, order.size)
    # Ours wraps parts of a model: mlx-lm runs on one without wrappers.
    model = LanguageModel(same_network(network))
    parameters = sum(array.size for _, array in tree_flatten(network.parameters()) if isinstance(array, mx.array))
    yield Built(kind, model.architecture, model.level, parameters)
    random = np.random.default_rng(0)
    context = random.integers(model.vocabulary, size=order.context).tolist()
    stock, ours = StockSequence(network, context), OurSequence(model, context)
    for sample in range(1 + order.samples):
        tokens = random.integers(model.vocabulary, size=max(*order.widths, 2 * order.round)).tolist()
        times = {width: _turns(stock, ours, tokens[:width], model.level, sample, clock) for width in order.widths}
        whole, undo = _round(ours, tokens, order.round, model.level, clock)
        if sample:
            by_name = {name: _of(name, times) for name in ("stock", "chain", "tree")}
            yield Sampled(kind=kind, **by_name, round=1e3 * whole, undo=1e3 * undo)


def _turns(
    stock: StockSequence, ours: OurSequence, tokens: Sequence[int], level: Level, turn: int, clock: Clock
) -> dict[str, float]:
    """Seconds of a forward by everyone."""
    contenders: list[tuple[str, StockSequence | OurSequence, Forward]]
    contenders = [("stock", stock, stock.evaluate), ("chain", ours, ours.chain)]
    if level == "tree":
        contenders.append(("tree", ours, ours.tree))
    # Each goes first in its turn: what the one before leaves in the processor's caches favours nobody.
    first = turn % len(contenders)
    seconds = {}
    for name, sequence, forward in contenders[first:] + contenders[:first]:
        seconds[name] = _timed(clock, forward, tokens)
        sequence.undo()
    return seconds


def _round(ours: OurSequence, tokens: Sequence[int], width: int, level: Level, clock: Clock) -> tuple[float, float]:
    """Seconds of a forward over a chain, and of committing its first half."""
    chain, after = tokens[:width], tokens[width : 2 * width]
    whole = _timed(clock, ours.chain, chain)
    began = clock()
    ours.keep(width // 2)
    undo = clock() - began
    if level != "tree":
        # These caches go back to the begin of the chain, and the next forward repeats what was accepted.
        repeated = _timed(clock, ours.chain, after)
        ours.undo()
        _timed(clock, ours.chain, chain)
        ours.keep(width)
        undo += repeated - _timed(clock, ours.chain, after)
    ours.undo()
    return whole, undo


def _timed(clock: Clock, forward: Forward, tokens: Sequence[int]) -> float:
    began = clock()
    mx.eval(forward(tokens))
    return clock() - began


def _of(name: str, times: dict[int, dict[str, float]]) -> dict[int, float]:
    """Milliseconds by width."""
    return {width: 1e3 * seconds[name] for width, seconds in times.items() if name in seconds}
