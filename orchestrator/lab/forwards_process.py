"""Compares and times a model's forwards by width and context: `python -m orchestrator.lab.forwards_process ORDER`.

One JSON report a line. A forward over several tokens must give the logits of as many forwards over one token; on a
GPU it does up to the order of sums, and where two tokens are nearly tied, the order decides.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
from mlx.utils import tree_flatten, tree_map
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from orchestrator.lab.forwards import (
    Compared,
    ForwardOrder,
    ForwardReport,
    ForwardsReady,
    ForwardTimed,
    Gap,
    Head,
    LoopTimed,
    Parting,
    Shape,
    Ties,
    Undone,
)
from orchestrator.lab.random_networks import random_network, same_network
from protocol.child_process import claim_output
from protocol.inference.language_model import LanguageModel
from protocol.inference.packed_weights import dequantized
from protocol.inference.slots import PREFIX
from protocol.inference.tree_sequence import TreeSequence
from protocol.messages.base import Level
from protocol.messages.sampling import Sampling
from protocol.sampling.gumbel_noise import Noise, scores

Clock = Callable[[], float]
"""Seconds."""
Forward = Callable[[Sequence[int]], mx.array]
_WARM_UP = 2
_SHAPES: Mapping[Level, tuple[Shape, ...]] = {"tree": ("chain", "tree"), "chain": ("chain",), "plain": ()}
"""Of forwards over several tokens, by what the model evaluates."""
_CHUNK = 512
_COMPUTED = 32
"""Tokens of a context whose KV is computed; that of the others is made up where the layers allow it."""
_MOST_MADE_UP = 1 << 15
_TREE = (PREFIX, 0, 0, 1, 1)
"""Parents of the rows of a loop over trees."""


def main() -> int:
    order = msgspec.json.decode(sys.argv[-1], type=ForwardOrder)
    tell = claim_output()
    clock, network = time.perf_counter, None
    if order.folder:
        model = LanguageModel.load(Path(order.folder), In32Bits() if order.precision == "float32" else None)
    else:
        network = random_network(order.kind, order.size)
        # Ours wraps parts of a model: mlx-lm runs on one without wrappers.
        model = LanguageModel(same_network(network))
        if mx.default_device() == mx.Device(mx.cpu):
            # Only this process's own time counts: other programs may be at work too.
            clock = time.process_time
    for report in examine(model, order, clock, network):
        tell(report)
    return 0


class In32Bits:
    """For `LanguageModel.load`: the whole network, with every weight unpacked to float32."""

    def divide(self, network: Any) -> None:
        """Unpack in place. Weights are not read yet."""
        dequantized(network).set_dtype(mx.float32)

    def await_loaded(self) -> None:
        """Nobody else loads."""


def examine(model: LanguageModel, order: ForwardOrder, clock: Clock, network: Any = None) -> Iterator[ForwardReport]:
    """Everything that the order asks for, as far as the model's level allows it. `network`: the same model as mlx-lm
    runs it, if it is timed beside ours."""
    sequence = model.sequence()
    first = sequence.evaluate((0,), (PREFIX,))
    device = "GPU" if mx.default_device() == mx.Device(mx.gpu) else "processor"
    arrays = [array for _, array in tree_flatten(model.network.parameters()) if isinstance(array, mx.array)]
    parameters = sum(array.size for array in arrays)
    type = str(first.dtype).removeprefix("mlx.core.")
    yield ForwardsReady(device, type, model.architecture, model.level, parameters)
    if order.compared:
        yield from _compared(model, order, "own", first.dtype)
        if "float32" in order.heads and first.dtype != mx.float32 and model.tap is not None:
            restore = model.tap.compute_head_in_float32()
            yield from _compared(model, order, "float32", mx.float32)
            restore()
    for context in order.contexts:
        yield from _timed(model, order, context, clock, network)
    if order.rounds:
        yield from _loops(model, order, clock)
    noise = Noise(model.vocabulary)
    for parting in order.partings:
        yield Gap(gap(model, parting, noise))


def _compared(model: LanguageModel, order: ForwardOrder, head: Head, kind: mx.Dtype) -> Iterator[Ties | Compared]:
    """`kind`: of the logits."""
    expected = _rows(model, order, 1, "chain")
    yield ties(expected, float(mx.finfo(kind).eps), head)
    for width in order.compared:
        for shape in _SHAPES[model.level] if width > 1 else ("chain",):
            got = _rows(model, order, width, shape)
            yield msgspec.structs.replace(compare(expected[: len(got)], got, width, shape), head=head)


def ties(logits: np.ndarray, epsilon: float, head: Head) -> Ties:
    """(N, V) float32 logits, which had a type with this distance from 1 to the next number."""
    second, first = np.sort(np.partition(logits, -2, axis=1)[:, -2:], axis=1).T
    unit = 2.0 ** np.floor(np.log2(np.maximum(np.abs(first), 1e-30))) * epsilon
    near = first - second <= unit
    return Ties(head, len(logits), int((first == second).sum()), int(near.sum()))


def compare(expected: np.ndarray, got: np.ndarray, width: int, shape: Shape) -> Compared:
    """(N, V) float32 logits of the same N positions."""
    spread = expected.std(axis=1)
    best, theirs = expected.argmax(axis=1), got.argmax(axis=1)
    flipped = np.flatnonzero(best != theirs)
    second, first = np.sort(np.partition(expected, -2, axis=1)[:, -2:], axis=1).T
    gaps = ((first - second) / spread)[flipped]
    difference = float((np.abs(got - expected).max(axis=1) / spread).max())
    return Compared(width, shape, len(expected), difference, len(flipped), float(gaps.max()) if len(gaps) else None)


def _rows(model: LanguageModel, order: ForwardOrder, width: int, shape: Shape) -> np.ndarray:
    """(N, V) float32: the logits at every position behind the prompt, evaluated `width` tokens at a time.

    The KV of earlier tokens is that of the same width, as in a pipeline.
    """
    sequence = _prefilled(model, order.tokens[: order.prompt])
    rest, rows = order.tokens[order.prompt :], []
    step = width if shape == "chain" else width - 1
    # Only whole forwards: a narrower last one would not be of this width.
    for begin in range(0, len(rest) - step + 1, step):
        path = rest[begin : begin + step]
        first = sequence.next_row
        parents = [PREFIX, *range(first, first + step - 1)]
        if shape == "tree":
            path, parents = (*path, path[0]), [*parents, PREFIX]
        logits = sequence.evaluate(path, parents)[:step].astype(mx.float32)
        rows.append(np.array(logits))
        sequence.keep(range(first, first + step), ())
    return np.concatenate(rows)


def _timed(
    model: LanguageModel, order: ForwardOrder, context: int, clock: Clock, network: Any
) -> Iterator[ForwardTimed | Undone]:
    random = np.random.default_rng(context)
    tokens = random.integers(model.vocabulary, size=context).tolist()
    ours = _behind(model, tokens, max(*order.timed, order.undone))
    if ours is None:
        return
    stock = None if network is None else StockSequence(network, tokens)
    for width in order.timed if model.level != "plain" else (1,):
        seconds = [
            _sample(ours, stock, random.integers(model.vocabulary, size=width).tolist(), model.level, turn, clock)
            for turn in range(_WARM_UP + order.samples)
        ][_WARM_UP:]
        yield ForwardTimed(
            width, context, **{name: tuple(1e3 * taken[name] for taken in seconds) for name in seconds[0]}
        )
    if order.undone:
        both = [
            _undone(ours, random.integers(model.vocabulary, size=2 * order.undone).tolist(), model.level, clock)
            for _ in range(_WARM_UP + order.samples)
        ][_WARM_UP:]
        yield Undone(context, *(tuple(1e3 * taken for taken in times) for times in zip(*both, strict=True)))


def _sample(
    ours: "OurSequence", stock: "StockSequence | None", tokens: Sequence[int], level: Level, turn: int, clock: Clock
) -> dict[str, float]:
    """Seconds of a forward by everyone."""
    contenders: list[tuple[str, StockSequence | OurSequence, Forward]] = [("chain", ours, ours.chain)]
    if stock is not None:
        contenders.insert(0, ("stock", stock, stock.evaluate))
        if level == "tree":
            contenders.append(("tree", ours, ours.tree))
    # Each goes first in its turn: what the one before leaves in the processor's caches favours nobody.
    first = turn % len(contenders)
    seconds = {}
    for name, sequence, forward in contenders[first:] + contenders[:first]:
        seconds[name] = _seconds(clock, forward, tokens)
        sequence.undo()
    return seconds


def _undone(ours: "OurSequence", tokens: Sequence[int], level: Level, clock: Clock) -> tuple[float, float]:
    """Seconds of a forward over a chain, and of committing its first half."""
    width = len(tokens) // 2
    chain, after = tokens[:width], tokens[width:]
    whole = _seconds(clock, ours.chain, chain)
    began = clock()
    ours.keep(width // 2)
    undo = clock() - began
    if level != "tree":
        # These caches go back to the begin of the chain, and the next forward repeats what was accepted.
        repeated = _seconds(clock, ours.chain, after)
        ours.undo()
        _seconds(clock, ours.chain, chain)
        ours.keep(width)
        undo += repeated - _seconds(clock, ours.chain, after)
    ours.undo()
    return whole, undo


def _seconds(clock: Clock, forward: Forward, tokens: Sequence[int]) -> float:
    began = clock()
    mx.eval(forward(tokens))
    return clock() - began


class StockSequence:
    """Forwards of mlx-lm's behind one context."""

    def __init__(self, network: Any, context: Sequence[int]) -> None:
        self._network = network
        self._caches = make_prompt_cache(network)
        self._written = 0
        """Tokens behind the context."""
        for begin in range(0, len(context), _CHUNK):
            mx.eval(network(mx.array([list(context[begin : begin + _CHUNK])]), cache=self._caches))
        # A cache that can be trimmed now is trimmed later; the others get a copy of what they hold now.
        self._saved = [None if cache.is_trimmable() else _copied(vars(cache)) for cache in self._caches]

    def evaluate(self, tokens: Sequence[int]) -> mx.array:
        """(L, V) logits, not yet computed."""
        self._written += len(tokens)
        return self._network(mx.array([list(tokens)]), cache=self._caches).squeeze(0)

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
    """Forwards of ours behind what a sequence holds."""

    def __init__(self, sequence: TreeSequence) -> None:
        self._sequence = sequence
        self._context = sequence.committed
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


def _behind(model: LanguageModel, context: Sequence[int], width: int) -> OurSequence | None:
    """None if a forward of this width behind this context can't be."""
    sequence, length = _prefilled(model, context[:_COMPUTED]), len(context)
    if length > _COMPUTED and model.level == "tree" and sequence.row_bytes and length <= _MOST_MADE_UP:
        sequence.make_up(length)
    elif length + width > model.context:
        return None
    else:
        sequence = _prefilled(model, context)
    return OurSequence(sequence)


def gap(model: LanguageModel, parting: Parting, noise: Noise) -> float:
    """See `Gap`."""
    sequence = _prefilled(model, parting.tokens[:-1])
    logits = sequence.evaluate(parting.tokens[-1:], [PREFIX])
    sampling = Sampling(temperature=parting.temperature, seed=parting.seed)
    found = np.array(scores(logits, [len(parting.tokens)], sampling, noise))[0]
    following = [float(found[token]) for token in parting.following]
    if len(following) == 1:
        # The other text ends here, by a token that is not told: at best the second one.
        following.append(float(np.partition(found, -2)[-2]))
    spread = float(np.array(logits.astype(mx.float32)).std())
    return (float(found.max()) - min(following)) * (parting.temperature or 1.0) / spread


def _loops(model: LanguageModel, order: ForwardOrder, clock: Clock) -> Iterator[LoopTimed]:
    """Rounds of one token, as texts are decoded, and of small trees none of which is kept."""
    prompt = order.tokens[: order.prompt]
    stock = generate_step(mx.array(prompt), model.network, max_tokens=-1)
    yield LoopTimed("mlx-lm", 1, _mean(lambda: next(stock), order.rounds, clock))
    for parents in ((PREFIX,), _TREE) if model.level == "tree" else ((PREFIX,),):
        for ahead in (False, True):
            rounds = Rounds(_prefilled(model, prompt), parents, ahead)
            name = "ahead" if ahead else "waited"
            yield LoopTimed(name, len(parents), _mean(rounds.advance, order.rounds, clock))


class Rounds:
    """Forwards of rows with these parents behind a text; a single row is kept."""

    def __init__(self, sequence: TreeSequence, parents: Sequence[int], ahead: bool) -> None:
        self._sequence, self._parents, self._ahead = sequence, parents, ahead
        self._awaited: mx.array | None = None

    def advance(self) -> None:
        sequence, first = self._sequence, self._sequence.next_row
        rows = [parent if parent == PREFIX else first + parent for parent in self._parents]
        picks = mx.argmax(sequence.evaluate([first % 7 + row for row in range(len(rows))], rows), axis=-1)
        mx.async_eval(picks)
        mx.eval(self._awaited if self._ahead and self._awaited is not None else picks)
        self._awaited = picks
        sequence.keep((first,) if len(rows) == 1 else (), ())


def _mean(advance: Callable[[], object], rounds: int, clock: Clock) -> float:
    """Milliseconds of a round."""
    for _ in range(_WARM_UP):
        advance()
    began = clock()
    for _ in range(rounds):
        advance()
    return 1e3 * (clock() - began) / rounds


def _prefilled(model: LanguageModel, tokens: Sequence[int]) -> TreeSequence:
    sequence = model.sequence()
    for begin in range(0, len(tokens), _CHUNK):
        sequence.prefill(tokens[begin : begin + _CHUNK])
    return sequence


if __name__ == "__main__":
    sys.exit(main())
