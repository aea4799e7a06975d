"""Recurrences and short convolutions of mlx-lm's layers: they record their inputs, and run over trees.

The models of mlx-lm call a recurrence by a name in their module, and this module wraps the function behind that name,
and every depthwise convolution. Whose tokens they are is said by the cache that the layer has read last. Knows no
sequence.

Linear recurrences run over all rows of a tree at once, from one state: the state is read once, whatever the tree.
Unrolled along a row's path, a linear recurrence is attention to the path with decays in place of a softmax, plus the
decayed first state. The delta rule adds a triangular system for what each row writes (Gated Delta Networks,
arXiv 2412.06464, section 3.3; over trees: arXiv 2608.20961). Everything is computed in float32, but for what mlx-lm
rounds to the model's own type before the recurrence: in half precision the logits would be others.

Shapes: R rows, H heads; a state is (1, H, ...) as in mlx-lm, or None before the first token.
"""

import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from inspect import signature
from typing import Any, NamedTuple, Protocol, TypeAlias

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm.models import gated_delta, ssm

from protocol.inference.observed_modules import modules_of


@lru_cache(maxsize=4)
def ancestry(parents: tuple[int, ...]) -> "Ancestry":
    """Of these rows. All layers of a forward ask for the same."""
    return Ancestry(parents)


class Ancestry:
    """Rows in an order in which parents come before their children."""

    def __init__(self, parents: Sequence[int]) -> None:
        """`parents[i]`: the row before row i, or -1."""
        self.paths: list[tuple[int, ...]] = []
        """For each row, the rows from the first one of its path to itself."""
        for row, parent in enumerate(parents):
            self.paths.append((*(self.paths[parent] if parent >= 0 else ()), row))
        self.depth = max(len(path) for path in self.paths)
        """Rows of the longest path."""
        seen: Any = np.zeros((len(parents), len(parents)), dtype=bool)
        for row, path in enumerate(self.paths):
            seen[row, list(path)] = True
        self.seen = mx.array(seen)
        """(R, R): row i sees row j, itself included."""
        self.before = mx.array(seen & ~np.eye(len(parents), dtype=bool))
        """(R, R): the same without itself."""
        self._windows: dict[int, mx.array] = {}
        """By width."""

    def windows(self, width: int) -> mx.array:
        """(R, width): for each row, the last `width` of `width` - 1 earlier entries and its path, where the entries
        come first and row i is at `width` - 1 + i."""
        if width not in self._windows:
            earlier = range(width - 1)
            found = [[*earlier, *(width - 1 + row for row in path)][-width:] for path in self.paths]
            self._windows[width] = mx.array(found)
        return self._windows[width]


_Compute: TypeAlias = Callable[..., mx.array]
_decay: _Compute = vars(gated_delta)["compute_g"]
_bounded_decay: _Compute = vars(gated_delta)["compute_lower_bound_g"]
_time_steps: _Compute = vars(ssm)["compute_dt"]
_BLOCK = 64
"""Tokens of a path that are solved at once."""
_DEEP = 16
"""Rows of a path, above which halves are faster than row by row."""
_LEAST_DECAY = 1e-30
"""Smaller factors are none at all in float32, and have no logarithm."""


class Unrolled(NamedTuple):
    """A recurrence over rows: S_i = S_0 exp(t_i) + sum of w_j k_j^T exp(t_i - t_j) over the rows j on the path of i."""

    outputs: mx.array
    """(1, R, H, D), or as mlx-lm's function has them."""
    keys: mx.array
    """k, (H, R, C)."""
    written: mx.array
    """w, (H, R, D)."""
    total: mx.array
    """t, (H, R, C) or (H, R, 1): logarithms of the factors from the first state."""
    element: mx.Dtype = mx.float32
    """Of the states that mlx-lm keeps."""


def state_behind(unrolled: Unrolled, path: mx.array, first: mx.array | None) -> mx.array:
    """(1, H, D, C): the state behind the last of the rows `path`, of one path, from the first state."""
    parts = (unrolled.keys, unrolled.written, unrolled.total)
    keys, written, total = (mx.take(each, path, axis=1) for each in parts)
    end = total[:, -1:]
    added = written.swapaxes(1, 2) @ (keys * mx.exp(end - total))
    behind = added if first is None else added + mx.exp(end) * first.squeeze(0)
    return behind[None].astype(unrolled.element)


def gated_delta_tree(call: Mapping[str, Any], tree: Ancestry) -> Unrolled:
    """mlx-lm's `gated_delta_update`: S_i = S_p diag(g_i) + u_i k_i^T for the parent p of row i, where
    u_i = b_i (v_i - S_p diag(g_i) k_i), and y_i = S_i q_i. The decay g is a number, or one a channel of the key."""
    heads = call["v"].shape[2]
    q, k, v = (_by_head(call[name], heads) for name in ("q", "k", "v"))
    strength = mx.sigmoid(call["b"].squeeze(0)).astype(mx.float32).T[..., None]
    if call.get("allow_neg_eigval"):
        strength = 2.0 * strength
    bound = call.get("lower_bound")
    gates = (call["A_log"], call["a"], call["dt_bias"])
    decay = _decay(*gates) if bound is None else _bounded_decay(*gates, bound)
    logs = mx.log(mx.maximum(decay.squeeze(0).astype(mx.float32), _LEAST_DECAY))
    logs = mx.moveaxis(logs if logs.ndim == 3 else logs[..., None], 0, 1)
    total, between = _decays(logs, tree)
    keys = _products(k, k, between) * mx.where(tree.before, strength, 0.0)
    state = call.get("state")
    wanted = strength * (v if state is None else v - _read(state, k * mx.exp(total)))
    written = _solved(keys, wanted, tree)
    y = mx.where(tree.seen, _products(q, k, between), 0.0) @ written
    if state is not None:
        y = y + _read(state, q * mx.exp(total))
    element = mx.float32 if state is None else state.dtype
    return Unrolled(y.swapaxes(0, 1)[None].astype(call["q"].dtype), k, written, total, element)


def gated_delta_path(call: Mapping[str, Any]) -> tuple[mx.array, mx.array]:
    """mlx-lm's `gated_delta_update` over one path, with one decay a head: outputs and state. Blocks of tokens are
    solved at once, where mlx-lm goes token by token."""
    state, outputs = call.get("state"), list[mx.array]()
    for begin in range(0, call["v"].shape[1], _BLOCK):
        block = {name: call[name][:, begin : begin + _BLOCK] for name in ("q", "k", "v", "a", "b")}
        length = block["v"].shape[1]
        path = ancestry(tuple(range(-1, length - 1)))
        unrolled = gated_delta_tree({**call, **block, "state": state}, path)
        state = state_behind(unrolled, mx.arange(length), state)
        outputs.append(unrolled.outputs)
    assert state is not None
    return mx.concatenate(outputs, axis=1), state


def _solved(keys: mx.array, wanted: mx.array, tree: Ancestry) -> mx.array:
    """W of W + `keys` W = `wanted`, where `keys` are (H, R, R) factors from the rows before each row."""
    if tree.depth > _DEEP:
        return _inverse(keys) @ wanted
    written = wanted
    # Row by row along the longest path: after as many steps every row is solved.
    for _ in range(tree.depth - 1):
        written = wanted - keys @ written
    return written


def _inverse(keys: mx.array) -> mx.array:
    """(I + K)^-1 of strictly lower triangular K, by halves: that of a whole follows from those of its two parts. A
    series of powers of K would lose its digits in large terms."""
    rows = keys.shape[1]
    whole = 4
    while whole < rows:
        whole *= 2
    keys = mx.pad(keys, [(0, 0), (0, whole - rows), (0, whole - rows)])
    size = 4
    parts = _diagonal(keys, size)
    squares = parts @ parts
    inverse = mx.eye(size) - parts + squares - squares @ parts
    while size < whole:
        lower = _diagonal(keys, 2 * size)[..., size:, :size]
        upper_left, lower_right = inverse[:, 0::2], inverse[:, 1::2]
        lower_left = -(lower_right @ lower @ upper_left)
        top = mx.concatenate([upper_left, mx.zeros_like(upper_left)], axis=-1)
        inverse = mx.concatenate([top, mx.concatenate([lower_left, lower_right], axis=-1)], axis=-2)
        size *= 2
    return inverse[:, 0, :rows, :rows]


def _diagonal(square: mx.array, size: int) -> mx.array:
    """(H, N, size, size): the blocks on the diagonal of (H, N * size, N * size)."""
    return mx.stack([square[:, at : at + size, at : at + size] for at in range(0, square.shape[1], size)], axis=1)


def state_space_tree(call: Mapping[str, Any], tree: Ancestry) -> Unrolled:
    """mlx-lm's `ssm_update` (Mamba 2, arXiv 2405.21060): S_i = exp(t_i A) S_p + t_i x_i B_i^T,
    y_i = S_i C_i + D x_i, with the time step t_i."""
    heads = call["hidden_states"].shape[2]
    x, write, read = (_by_head(call[name], heads) for name in ("hidden_states", "B", "C"))
    step = _time_steps(call["dt"], call["dt_bias"], call.get("time_step_limit", (0.001, 100.0)))
    step = mx.reshape(step, (-1, heads)).T[..., None]
    logs = -mx.exp(call["A_log"].astype(mx.float32))[:, None, None] * step
    total, between = _decays(logs, tree)
    written = step * x
    y = mx.where(tree.seen, _products(read, write, between), 0.0) @ written
    state = call.get("state")
    if state is not None:
        y = y + _read(state, read) * mx.exp(total)
    y = y + x * call["D"].astype(mx.float32)[:, None, None]
    element = mx.float32 if state is None else state.dtype
    return Unrolled(y.swapaxes(0, 1)[None].astype(call["hidden_states"].dtype), write, written, total, element)


def linear_attention_tree(call: Mapping[str, Any], tree: Ancestry) -> Unrolled:
    """mlx-lm's `recurrent_gla`: S_i = exp(g) S_p + k_i^T v_i, y_i = scale q_i S_i. Its state is (1, H, K, V)."""
    element = call["q"].dtype
    scaled = {**call, "q": call["q"] * call["scale"]}
    q, k, v = (scaled[name].squeeze(0).astype(mx.float32) for name in ("q", "k", "v"))
    # mlx-lm rounds this decay to the model's own type, and over a hundred tokens that adds up.
    decay = mx.exp(call["g"]).astype(element).astype(mx.float32)
    logs = mx.log(mx.maximum(decay, _LEAST_DECAY))
    logs = mx.broadcast_to(mx.reshape(logs, (-1, 1, 1)), (*q.shape[:2], 1))
    total, between = _decays(logs, tree)
    y = mx.where(tree.seen, _products(q, k, between), 0.0) @ v
    state = call.get("h")
    if state is not None:
        y = y + (q * mx.exp(total)) @ state.squeeze(0).astype(mx.float32)
    return Unrolled(y[None].astype(element), v, k, total, element)


def _by_head(x: mx.array, heads: int) -> mx.array:
    """(H, R, D) float32 from (1, R, groups, D): a group's entries are those of all its heads."""
    groups = x.squeeze(0).astype(mx.float32).swapaxes(0, 1)
    return groups if groups.shape[0] == heads else mx.repeat(groups, heads // groups.shape[0], axis=0)


def _decays(logs: mx.array, tree: Ancestry) -> tuple[mx.array, mx.array]:
    """From (H, R, C) logarithms, C channels or 1: logarithms of the factors from the first state to each row, and
    (H, R, R, C) factors from row j to row i behind it. Rows that don't see each other have a factor of no meaning."""
    total = tree.seen.astype(mx.float32) @ logs
    difference = total[:, :, None] - total[:, None]
    return total, mx.exp(mx.minimum(difference, 0.0))


def _products(left: mx.array, right: mx.array, between: mx.array) -> mx.array:
    """(H, R, R): inner products of rows i and j, each channel with its factor from j to i."""
    if between.shape[-1] == 1:
        return (left @ right.swapaxes(1, 2)) * between[..., 0]
    return (left[:, :, None] * between * right[:, None]).sum(axis=-1)


def _read(state: mx.array, rows: mx.array) -> mx.array:
    """(H, R, D) from a state (1, H, D, C) and (H, R, C)."""
    return rows @ state.squeeze(0).astype(mx.float32).swapaxes(1, 2)


TreeForm = Callable[[Mapping[str, Any], Ancestry], Unrolled]
"""From a call's arguments over all rows."""


class RecurrenceKind(NamedTuple):
    """What a function of mlx-lm computes."""

    inputs: tuple[str, ...]
    """Its arguments that hold one entry a token."""
    axis: int
    """The axis of tokens in these, and in its first result. The second result is the state."""
    state: str
    """The argument that holds the state before the first token."""
    over_tree: TreeForm
    over_path: Callable[[Mapping[str, Any]], tuple[mx.array, mx.array]] | None = None
    """The function over one path of many tokens, faster than mlx-lm's without a GPU."""
    two_forms: bool = False
    """On a GPU, mlx-lm computes one token in float32, and several of them in part in the model's own type."""


KINDS = {
    "gated_delta_update": RecurrenceKind(("q", "k", "v", "a", "b"), 1, "state", gated_delta_tree, gated_delta_path),
    "ssm_update": RecurrenceKind(("hidden_states", "B", "C", "dt"), 1, "state", state_space_tree, two_forms=True),
    "recurrent_gla": RecurrenceKind(("q", "k", "v"), 2, "h", linear_attention_tree),
}
"""By the name in mlx-lm's modules."""


_ONE_DECAY = 3
"""Dimensions of gates with one number a head and token."""
_MANY = 16
"""Tokens of a prompt's chunk, from which blocks are faster than token by token."""


class Recorder(Protocol):
    """The cache of a recurrent layer."""

    def recur(self, recurrence: "Recurrence", arguments: dict[str, Any]) -> tuple[mx.array, mx.array]:
        """Outputs and the state behind them, in place of the recurrence's own."""
        ...

    def convolve(self, convolution: "ShortConvolution", x: mx.array) -> mx.array:
        """(1, L, D) outputs from (1, K - 1 + L, D), which begins with the state."""
        ...


class _Reading:
    """The recorder whose layer is at work. A forward is built in one thread, layer by layer."""

    recorder: Recorder | None = None


def reads(recorder: Recorder) -> None:
    """The layer of this recorder is at work from now on."""
    _Reading.recorder = recorder


@contextmanager
def reading() -> Generator[None]:
    """Recorders are read inside."""
    try:
        yield
    finally:
        _Reading.recorder = None


class Recurrence:
    """A function of mlx-lm, by whose name its models call this."""

    def __init__(self, inner: Callable[..., tuple[mx.array, mx.array]], kind: RecurrenceKind) -> None:
        self.inner = inner
        self.kind = kind
        self.entry = -1
        """The entry of mlx-lm's cache that holds its state, once a forward has shown it."""
        self._signature = signature(inner)

    def __call__(self, *arguments: Any, **others: Any) -> tuple[mx.array, mx.array]:
        if _Reading.recorder is None:
            return self.inner(*arguments, **others)
        return _Reading.recorder.recur(self, self._signature.bind(*arguments, **others).arguments)

    def is_unrolled(self, tokens: int) -> bool:
        """A path of so many tokens takes the form for trees too: without a GPU mlx-lm goes token by token, or takes as
        long, and a path that is accepted in part would be computed again. With one, where mlx-lm takes another form
        for several tokens than for one, rounded otherwise."""
        return tokens > 1 and (self.kind.two_forms or mx.default_device() == mx.Device(mx.cpu))

    def over_prompt(self, arguments: Mapping[str, Any]) -> tuple[mx.array, mx.array]:
        """Over tokens that follow the state's: the function itself, or an equal one that is faster here."""
        path, gate = self.kind.over_path, arguments.get("a")
        tokens = arguments[self.kind.inputs[0]].shape[self.kind.axis]
        single = gate is not None and gate.ndim == _ONE_DECAY and arguments.get("mask") is None
        if path is None or not single or tokens < _MANY or not self.is_unrolled(tokens):
            return self.run(arguments)
        return path(arguments)

    def run(self, arguments: Mapping[str, Any]) -> tuple[mx.array, mx.array]:
        """The function itself."""
        call = self._signature.bind_partial()
        call.arguments.update(arguments)
        return self.inner(*call.args, **call.kwargs)


class ShortConvolution(nn.Module):
    """A depthwise convolution over the last tokens of each path."""

    def __init__(self, inner: nn.Conv1d) -> None:
        super().__init__()
        self.inner = inner
        self.entry = -1
        """The entry of mlx-lm's cache that holds its last inputs, once a forward has shown it."""

    def __call__(self, x: mx.array) -> mx.array:
        if _Reading.recorder is None:
            return self.inner(x)
        return _Reading.recorder.convolve(self, x)

    def __getattr__(self, name: str) -> Any:
        # Some layers read the weight.
        held = _held(self)
        if name in held:
            return held[name]
        if "inner" not in held:
            raise AttributeError(name)
        return getattr(held["inner"], name)


def _held(module: Any) -> dict[str, Any]:
    """The parameters and submodules of a module by name: `nn.Module` is such a dictionary."""
    return module


def let_recurrences_record(model: nn.Module) -> None:
    """Wrap the recurrences and the short convolutions of this model's layers."""
    layers = modules_of(model)
    modules = {sys.modules[type(layer).__module__] for layer in layers}
    for module in modules:
        for name, kind in KINDS.items():
            inner: Any = vars(module).get(name)
            if inner is not None and not isinstance(inner, Recurrence):
                setattr(module, name, Recurrence(inner, kind))
    for layer in layers:
        if isinstance(layer, ShortConvolution):
            continue
        for name, part in list(_held(layer).items()):
            if isinstance(part, nn.Conv1d) and part.groups > 1:
                setattr(layer, name, ShortConvolution(part))
