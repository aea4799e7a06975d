"""Warms a model's forwards and measures what they cost by width, once for a model on a system. Knows no messages.

A GPU compiles and loads kernels at their first use, and switches kernels at some widths: the first forwards of a width
would tilt what the orchestrator learns, and no line through a few widths gives the others. Tokens are random: a mixture
of experts would read only one token's experts otherwise.

Stored costs are an expectation that the orchestrator corrects by real rounds. Another start only warms a width or two
and times them, which shows costs that were stored beside a busy device.
"""

import fcntl
import logging
import math
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple, Protocol

import mlx.core as mx
import msgspec
import numpy as np

from protocol.inference.device import compute
from protocol.inference.slots import PREFIX
from protocol.inference.tree_sequence import TreeSequence
from protocol.messages.base import ContextCosts, Costs, Level
from protocol.paths import cache_folder, record_file
from protocol.security.private_files import keep, kept, lock_file
from protocol.system import installed_version, seconds_asleep, system_build

log = logging.getLogger(__name__)

Cost = tuple[int, float]
"""Tokens and seconds of a forward."""
_FOLDER, _PACKAGES = "forward-costs", ("mlx", "mlx-lm", "launch-pipeline")
_CHANGED = 1.25
"""Times that a forward differs from what was stored because of something else than noise."""
_AWAKE = 1.0
"""Seconds of sleep that count."""
WIDTHS = (1, 2, 5, 6, 10, 11, 8, 9, 4, 12, 13, 17, 3, 7, 14, 15, 16)
"""In the order of their use if the time is short: on both sides of the widths where MLX's kernels for few rows change
(mlx/backend/metal/quantized.cpp, qmv_wide and get_qmv_batch_limit), then the rest."""
_FEWEST = 5
"""Measured widths below which the others can't be told from them."""
_PREFIX_TOKENS = 32
_BEHIND_WIDTHS = (1, 8, 9, 4, 5, 16, 2, 17)
"""The same behind a long context: on both sides of the widths where MLX's attention changes
(mlx/backend/metal/scaled_dot_product_attention.cpp, has_fused_kernel)."""
_BEHIND, _LEAST_BEHIND = 4096, 1024
"""Tokens of that context, fewer where their KV takes too much memory, but not less than that."""
_BEHIND_BYTES = 256 << 20
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


class ForwardCosts(NamedTuple):
    """What forwards of a model cost. Either may be empty: nothing was measured."""

    by_width: Costs = ()
    """Behind hardly any context, by rising width."""
    by_context: ContextCosts = ()
    """By width, the seconds that 1,000 tokens of context add."""


class StoredCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a file."""

    key: tuple[str, ...]
    """What they hold for: what is computed, at which level; the device, the system's build, versions of packages."""
    asleep: float
    """`seconds_asleep` when they were measured."""
    costs: ForwardCosts
    contexts: bool = False
    """A measurement of `by_context` was tried: if it is empty, it can't be measured."""


def costs_at_load(model: _Model, loading: float, identity: str = "", *, contexts: bool = False) -> ForwardCosts:
    """The costs of a model that took `loading` seconds to load, measured for a second and a quarter of that time; with
    `contexts`, those of a long context for half as long again. Those of an earlier start where they still hold.

    `identity`: of what is computed, fingerprints of weights above all; empty: costs are never stored.

    Nothing on a processor, where one measurement would take as long as a start. Nothing if the device fails: the worker
    can serve all the same. Target and draft begin together and may share a GPU, so they measure in turns.
    """
    if mx.default_device() == mx.Device(mx.cpu):
        return ForwardCosts()
    budget, clock = 1.0 + loading / 4, time.perf_counter
    try:
        with _in_turns():
            key = _key(model, identity)
            stored = _stored(key) if identity else None
            known = stored if stored is not None and _hold(stored, model, clock) else None
            costs = known.costs if known is not None else ForwardCosts(measured_costs(model, clock, budget))
            if known is not None and (known.contexts or not contexts):
                return costs
            if contexts:
                costs = costs._replace(by_context=measured_context_costs(model, costs.by_width, clock, budget / 2))
            if identity and costs.by_width:
                with suppress(OSError):
                    keep(record_file(_FOLDER, key), StoredCosts(key, seconds_asleep(), costs, contexts))
            return costs
    except RuntimeError as error:
        log.warning("the costs of forwards are not measured: %s", error)
        return ForwardCosts()


def _key(model: _Model, identity: str) -> tuple[str, ...]:
    device, packages = mx.device_info().get("device_name"), map(installed_version, _PACKAGES)
    return identity, model.level, str(device), system_build(), *map(str, packages)


def _stored(key: tuple[str, ...]) -> StoredCosts | None:
    """None without a file for this key that is whole."""
    found = kept(record_file(_FOLDER, key), StoredCosts)
    if found is None or found.key != key or not found.costs.by_width:
        return None
    return found if all(sorted(dict(costs).items()) == list(costs) for costs in found.costs) else None


def _hold(stored: StoredCosts, model: _Model, clock: Callable[[], float]) -> bool:
    """Warm the narrowest width and another one, drawn at random, and compare them with what was stored.

    Other work on the device only adds time. So a forward that is quicker proves that the stored one was disturbed, and
    slower ones prove nothing, unless the machine has slept since.
    """
    known = dict(stored.costs.by_width)
    widths = dict.fromkeys((min(known), int(np.random.default_rng().choice(list(known)))))
    ratios = [seconds / known[width] for width, seconds in _Forwards(model, clock).timed(widths, math.inf).items()]
    slept = abs(seconds_asleep() - stored.asleep) > _AWAKE
    return min(ratios) > 1 / _CHANGED and not (slept and min(ratios) > _CHANGED)


@contextmanager
def _in_turns() -> Generator[None]:
    """Wait while another process of this machine is in here, though not for ever: it may hang."""
    try:
        cache_folder().mkdir(parents=True, exist_ok=True)
        lock = lock_file(cache_folder() / "forward-costs.lock")
    except OSError:
        yield
        return
    with lock:
        end = time.perf_counter() + _LONGEST_WAIT
        while time.perf_counter() < end:
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(_PAUSE)
        yield


def measured_costs(model: _Model, clock: Callable[[], float], budget: float) -> tuple[Cost, ...]:
    """The cost of a forward over a token tree, or over a path where the model evaluates no more, by rising width;
    nothing if `budget` seconds allow too few widths, or if the model evaluates a single token.

    Each width is warmed as a chain and as a tree and then measured once; the best of two counts where time is left.
    """
    if model.level == "plain" or model.context < _PREFIX_TOKENS + max(WIDTHS):
        return ()
    costs = _Forwards(model, clock).timed(WIDTHS, clock() + budget)
    return tuple(sorted(costs.items())) if len(costs) >= _FEWEST else ()


def measured_context_costs(
    model: _Model, costs: Sequence[Cost], clock: Callable[[], float], budget: float
) -> tuple[Cost, ...]:
    """What 1,000 tokens of context add to forwards of some of the widths in `costs`, which were measured behind hardly
    any; nothing where that can't be measured within `budget` seconds.

    Only time matters, so the context's KV is made up: to compute it would take the time of a prompt.
    """
    known = dict(costs)
    if model.level != "tree" or not known:
        return ()
    end, forwards = clock() + budget, _Forwards(model, clock)
    row = forwards.sequence.row_bytes
    room = model.context - max(_BEHIND_WIDTHS)
    context = min(_BEHIND, room, _BEHIND_BYTES // row) if row else 0
    if context < _LEAST_BEHIND:
        return ()
    forwards.sequence.make_up(context)
    added = {
        width: max(0.0, seconds - known[width]) / (context - _PREFIX_TOKENS) * 1000
        for width, seconds in forwards.timed([width for width in _BEHIND_WIDTHS if width in known], end).items()
    }
    return tuple(sorted(added.items())) if added.keys() >= set(_BEHIND_WIDTHS[:3]) else ()


class _Forwards:
    """Forwards of random tokens behind the same committed ones, a few random ones at first."""

    def __init__(self, model: _Model, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._vocabulary, self._random = model.vocabulary, np.random.default_rng(0)
        self._shape = _tree if model.level == "tree" else _chain
        self.sequence = model.sequence()
        self.sequence.prefill(self._tokens(_PREFIX_TOKENS))

    def timed(self, widths: Iterable[int], end: float) -> dict[int, float]:
        """Seconds by width, of as many of `widths` as there is time for until `end`."""
        costs: dict[int, float] = {}
        for width in widths:
            if self._clock() >= end:
                break
            self._seconds(_chain(width))
            self._seconds(self._shape(width))
            costs[width] = self._seconds(self._shape(width))
        for width in costs:
            if self._clock() >= end:
                break
            costs[width] = min(costs[width], self._seconds(self._shape(width)))
        return costs

    def _seconds(self, parents: Sequence[int]) -> float:
        """Of one forward, whose rows are dropped."""
        first = self.sequence.next_row
        rows = [parent if parent == PREFIX else first + parent for parent in parents]
        drawn = self._tokens(len(rows))
        began = self._clock()
        compute(self.sequence.evaluate(drawn, rows))
        seconds = self._clock() - began
        self.sequence.truncate(self.sequence.committed)
        return max(seconds, _LEAST_SECONDS)

    def _tokens(self, count: int) -> list[int]:
        return self._random.integers(self._vocabulary, size=count).tolist()


def _chain(width: int) -> list[int]:
    """Parents of `width` rows, counted from the first of them."""
    return [PREFIX, *range(width - 1)]


def _tree(width: int) -> list[int]:
    """The same for a root with two children, each of which has two, and so on."""
    return [PREFIX, *((row - 1) // 2 for row in range(1, width))]
