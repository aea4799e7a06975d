"""Linear recurrences over all rows of a tree at once, from one state: the state is read once, whatever the tree.

Unrolled along a row's path, a linear recurrence is attention to the path with decays in place of a softmax, plus the
decayed first state. The delta rule adds a triangular system for what each row writes (Gated Delta Networks,
arXiv 2412.06464, section 3.3; over trees: arXiv 2608.20961). Everything is computed in float32, but for what mlx-lm
rounds to the model's own type before the recurrence: in half precision the logits would be others.

Shapes: R rows, H heads; a state is (1, H, ...) as in mlx-lm, or None before the first token.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import mlx.core as mx
from mlx_lm.models import gated_delta, ssm

from protocol.inference.recurrences.ancestry import Ancestry, ancestry

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
