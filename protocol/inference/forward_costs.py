"""Warms a model's forwards and measures what they cost by width. Knows no messages.

A GPU compiles and loads kernels at their first use, and switches kernels at some widths: the first forwards of a width
would tilt what the orchestrator learns, and no line through a few widths gives the others. Tokens are random: a mixture
of experts would read only one token's experts otherwise.
"""

import fcntl
import logging
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import mlx.core as mx
import numpy as np

from protocol.inference.device import compute
from protocol.inference.layer_cache import FoldingCache, RowCache
from protocol.inference.slots import PREFIX
from protocol.inference.tree_sequence import TreeSequence
from protocol.messages.base import Level
from protocol.paths import cache_folder

log = logging.getLogger(__name__)

Cost = tuple[int, float]
"""Tokens and seconds of a forward."""
WIDTHS = (1, 2, 5, 6, 10, 11, 8, 9, 4, 12, 13, 17, 3, 7, 14, 15, 16)
"""In the order of their use if the time is short: on both sides of the widths where MLX's kernels for few rows change
(mlx/backend/metal/quantized.cpp, qmv_wide and get_qmv_batch_limit), then the rest."""
_FEWEST = 5
"""Measured widths below which the others can't be told from them."""
_CONTEXT_WIDTHS = (1, 8, 16, 4, 9, 2)
"""Of the forwards behind a longer context, in the order of their use: MLX's attention reads the KV once a row up to
eight, and block by block from nine on (mlx/backend/metal/scaled_dot_product_attention.cpp)."""
_LEAST_CONTEXT, _MOST_CONTEXT, _CONTEXT_BYTES = 1024, 8192, 1 << 28
"""Tokens of that context, and of its keys and values together."""
_PREFIX_TOKENS = 32
_LEAST_SECONDS = 1e-6
_LONGEST_WAIT = 10.0
"""Seconds for which one process waits until another one has measured."""
_PAUSE = 0.02


class _Model(Protocol):
    vocabulary: int
    """All tokens below it exist. Of a drafter it is the width of its outputs: it has more tokens."""
    context: int
    level: Level

    def sequence(self) -> TreeSequence: ...


def context_costs_at_load(model: _Model, costs: Sequence[Cost], loading: float) -> tuple[Cost, ...]:
    """What each token of context adds to forwards of a model with these `costs`, by rising width: measured for at most
    a quarter of the seconds that it took to load. Nothing where there are no costs."""
    if not costs:
        return ()
    try:
        with _in_turns():
            return measured_context_costs(model, dict(costs), time.perf_counter, loading / 4)
    except RuntimeError as error:
        log.warning("the costs of forwards behind a long context are not measured: %s", error)
        return ()


def measured_context_costs(
    model: _Model, costs: Mapping[int, float], clock: Callable[[], float], budget: float
) -> tuple[Cost, ...]:
    """Seconds a token of context, of forwards as in `measured_costs`, which gave `costs`; nothing if `budget` seconds
    allow only one width, or if the model's context is short."""
    end, random = clock() + budget, np.random.default_rng(0)
    prompt = model.sequence()
    tokens = random.integers(model.vocabulary, size=_PREFIX_TOKENS).tolist()
    prompt.prefill(tokens)
    held = slice(0, _PREFIX_TOKENS)
    rows = [
        each for cache in prompt.caches if isinstance(cache, RowCache) and cache.arrays for each in cache.rows(held)
    ]
    context = min(_MOST_CONTEXT, _CONTEXT_BYTES * _PREFIX_TOKENS // max(1, sum(each.nbytes for each in rows)))
    if min(context, model.context - max(_CONTEXT_WIDTHS)) < _LEAST_CONTEXT:
        return ()
    times = -(-context // _PREFIX_TOKENS)
    sequence = repeated(model.sequence(), prompt, (tokens * times)[:context])
    shape, found = _tree if model.level == "tree" else _chain, list[Cost]()
    for width in (each for each in _CONTEXT_WIDTHS if each in costs):
        if clock() >= end:
            break
        seconds = min(_timed(sequence, shape(width), context, clock, random, model.vocabulary) for _ in range(2))
        found.append((width, max(0.0, seconds - costs[width]) / (context - _PREFIX_TOKENS)))
    return tuple(sorted(found)) if len(found) > 1 else ()


def repeated(empty: TreeSequence, prompt: TreeSequence, context: Sequence[int]) -> TreeSequence:
    """The `empty` sequence behind a long context, whose caches repeat those of a shorter prompt: costs of forwards do
    not depend on what they hold. Computed on return."""
    length, held = len(context), prompt.committed
    for cache, short in zip(empty.caches, prompt.caches, strict=True):
        if isinstance(cache, FoldingCache) and isinstance(short, FoldingCache):
            cache.resume(length, short.state(held))
        elif isinstance(cache, RowCache) and isinstance(short, RowCache) and short.arrays:
            # A window never looks before its last rows.
            first = 0 if cache.window is None else max(0, length - max(held, cache.window))
            keys, values = (repeated_rows(rows, length - first) for rows in short.rows(slice(0, held)))
            cache.adopt(keys, values, first)
    empty.resumed(context)
    return empty


def repeated_rows(rows: mx.array, length: int) -> mx.array:
    """(1, heads, length, size) in memory of its own, computed."""
    times = -(-length // rows.shape[2])
    found = mx.contiguous(mx.concatenate([rows] * times, axis=2)[:, :, :length])
    compute(found)
    return found


def costs_at_load(model: _Model, loading: float) -> tuple[Cost, ...]:
    """The costs of a model that took `loading` seconds to load, measured for a second and a quarter of that time.

    Nothing on a processor, where one measurement would take as long as a start. Nothing if the device fails: the worker
    can serve all the same. Target and draft begin together and may share a GPU, so they measure in turns.
    """
    if mx.default_device() == mx.Device(mx.cpu):
        return ()
    try:
        with _in_turns():
            return measured_costs(model, time.perf_counter, 1.0 + loading / 4)
    except RuntimeError as error:
        log.warning("the costs of forwards are not measured: %s", error)
        return ()


@contextmanager
def _in_turns() -> Generator[None]:
    """Wait while another process of this machine is in here, though not for ever: it may hang."""
    try:
        cache_folder().mkdir(parents=True, exist_ok=True)
        lock = (cache_folder() / "forward-costs.lock").open("w")
    except OSError:
        yield
        return
    with lock:
        end = time.perf_counter() + _LONGEST_WAIT
        while not _locked(lock.fileno()) and time.perf_counter() < end:
            time.sleep(_PAUSE)
        yield


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def measured_costs(model: _Model, clock: Callable[[], float], budget: float) -> tuple[Cost, ...]:
    """The cost of a forward over a token tree, or over a path where the model evaluates no more, by rising width;
    nothing if `budget` seconds allow too few widths, or if the model evaluates a single token.

    Each width is warmed as a chain and as a tree and then measured once; the best of two counts where time is left.
    """
    if model.level == "plain":
        return ()
    shape = _tree if model.level == "tree" else _chain
    if model.context < _PREFIX_TOKENS + max(WIDTHS):
        return ()
    end = clock() + budget
    random = np.random.default_rng(0)
    sequence = model.sequence()
    sequence.prefill(random.integers(model.vocabulary, size=_PREFIX_TOKENS).tolist())
    costs: dict[int, float] = {}

    def forward(parents: Sequence[int]) -> float:
        return _timed(sequence, parents, _PREFIX_TOKENS, clock, random, model.vocabulary)

    for width in WIDTHS:
        if clock() >= end:
            break
        forward(_chain(width))
        forward(shape(width))
        costs[width] = forward(shape(width))
    for width in costs:
        if clock() >= end:
            break
        costs[width] = min(costs[width], forward(shape(width)))
    return tuple(sorted(costs.items())) if len(costs) >= _FEWEST else ()


def _timed(
    sequence: TreeSequence,
    parents: Sequence[int],
    context: int,
    clock: Callable[[], float],
    random: np.random.Generator,
    vocabulary: int,
) -> float:
    """Seconds of a forward over random tokens, which is undone."""
    first = sequence.next_row
    rows = [parent if parent == PREFIX else first + parent for parent in parents]
    tokens = random.integers(vocabulary, size=len(rows)).tolist()
    began = clock()
    compute(sequence.evaluate(tokens, rows))
    seconds = clock() - began
    sequence.truncate(context)
    return max(seconds, _LEAST_SECONDS)


def _chain(width: int) -> list[int]:
    """Parents of `width` rows, counted from the first of them."""
    return [PREFIX, *range(width - 1)]


def _tree(width: int) -> list[int]:
    """The same for a root with two children, each of which has two, and so on."""
    return [PREFIX, *((row - 1) // 2 for row in range(1, width))]
