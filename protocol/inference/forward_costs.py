"""Warms a model's forwards and measures what they cost by width. Knows no messages.

A GPU compiles and loads kernels at their first use, and switches kernels at some widths: the first forwards of a width
would tilt what the orchestrator learns, and no line through a few widths gives the others. Tokens are random: a mixture
of experts would read only one token's experts otherwise.
"""

import fcntl
import logging
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Protocol

import mlx.core as mx
import numpy as np

from protocol.inference.device import compute
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

    def tokens(count: int) -> list[int]:
        return random.integers(model.vocabulary, size=count).tolist()

    sequence = model.sequence()
    sequence.prefill(tokens(_PREFIX_TOKENS))
    costs: dict[int, float] = {}

    def forward(parents: Sequence[int]) -> float:
        first = sequence.next_row
        rows = [parent if parent == PREFIX else first + parent for parent in parents]
        drawn = tokens(len(rows))
        began = clock()
        compute(sequence.evaluate(drawn, rows))
        seconds = clock() - began
        sequence.truncate(_PREFIX_TOKENS)
        return max(seconds, _LEAST_SECONDS)

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


def _chain(width: int) -> list[int]:
    """Parents of `width` rows, counted from the first of them."""
    return [PREFIX, *range(width - 1)]


def _tree(width: int) -> list[int]:
    """The same for a root with two children, each of which has two, and so on."""
    return [PREFIX, *((row - 1) // 2 for row in range(1, width))]
