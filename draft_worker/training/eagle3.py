"""EAGLE-3 in training: a layer that reads the target's features, and behind them its own outputs.

Li et al. 2025 (arXiv 2503.01840, training-time test): the drafter's own outputs take the place of features that the
target has not computed yet, and training unrolls several such steps. Here the number of steps of each column is random,
up to the staleness that an asynchronous draft meets, since that draft is further ahead of the target than one round.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np

from draft_worker.drafters.eagle3 import Eagle3, write_eagle3
from draft_worker.training.chains import Chains, Judge, drawn, no_hits, whole, windows
from draft_worker.training.losses import loss, wanted
from draft_worker.training.rows import Row
from draft_worker.training.target import Target, fitting, trained
from protocol.contracts.drafters.description import Eagle3Form
from protocol.errors import InputError

DECAY = 0.8
"""Weight of a step relative to the one before."""


_FEWEST_LAYERS = 4
"""Of a target: the third output is that of the fourth layer from the end."""
_COPIED_NORM = "input_layernorm.weight"


def outputs(target: Target, chosen: int) -> tuple[int, ...]:
    """What it reads of a target. Raises InputError for a target whose layers it can't begin with, and for `chosen`."""
    if chosen:
        raise InputError("An eagle3 drafter has one layer: leave --layers out.")
    if target.layers < _FEWEST_LAYERS:
        raise InputError(
            f"{target.folder} has {target.layers} layers, and an eagle3 drafter reads outputs of {_FEWEST_LAYERS} or "
            "more: choose the kind lm."
        )
    if not all(_COPIED_NORM in target.layer(number) for number in (0, target.layers - 1)):
        raise InputError(
            f"The layers of {target.folder} have no {_COPIED_NORM}, which an eagle3 drafter begins with: choose a "
            "target of the Llama or Qwen family."
        )
    return _outputs(target.layers)


def _outputs(layers: int) -> tuple[int, ...]:
    """SafeAILab/EAGLE, eagle/model/modeling_llama_kv.py."""
    return tuple(sorted({1, layers // 2 - 1, layers - 4}))


class Eagle3Training:
    """Row p of a text joins the features of token p - 1 with the embedding of token p, and guesses token p + 1."""

    def __init__(self, target: Target, head_tokens: np.ndarray, recorded: tuple[int, ...], _: int) -> None:
        """`recorded`: the outputs that the rows' states hold."""
        self._target, self._head_tokens = target, head_tokens.astype(np.int32)
        self._columns = [recorded.index(output) for output in _outputs(target.layers)]
        self._head = target.head(mx.array(head_tokens))
        self.network = Eagle3(form(target, len(head_tokens)))
        self.network.load_weights(fitting(self.network, start(target, self.network.form)), strict=False)
        self.parameters_per_guess = trained(self.network) - self.network.fc.weight.size + self._head.size

    def loss(self, row: Row, random: np.random.Generator) -> mx.array:
        columns = drawn(row, random)
        if not columns.steps:
            return mx.array(0.0)
        slots = columns.guessed()
        choices = wanted(mx.array(row.states[slots, -1]) @ self._head.T, row.temperature)
        total = mx.array(0.0)
        for step, logits in enumerate(self._unrolled(row, columns)):
            here = choices.at(mx.array(np.searchsorted(slots, columns.slots(step))))
            total = total + DECAY**step * loss(logits, here).mean()
        return total

    def hits(self, row: Row, places: np.ndarray, judge: Judge) -> np.ndarray:
        columns, order = whole(row, places)
        chain = no_hits(places)
        for step, logits in enumerate(self._unrolled(row, columns)):
            slots = columns.slots(step)
            chain[order[: len(slots)], step] = judge(slots, logits)
        return windows(chain)

    def write(self, folder: Path) -> None:
        network = Eagle3(msgspec.structs.replace(self.network.form, own_head=True), self._head_tokens)
        network.update(self.network.parameters())
        network.lm_head.weight = self._head
        write_eagle3(folder, network)

    def _unrolled(self, row: Row, columns: Chains) -> Iterator[mx.array]:
        """For each step the (n, head) logits behind `columns.slots(step)`."""
        layer = _Rows(self.network)
        embedded = self._target.embed(mx.array(row.tokens))
        features = mx.array(row.states[:, self._columns].reshape(len(row.tokens), -1))
        known = self.network.fuse(mx.concatenate([mx.zeros_like(features[:1]), features[:-1]]))
        keys, values = layer.keys_values(layer.read(embedded, known), mx.arange(len(row.tokens)))
        state = known[mx.array(columns.places)]
        own: list[tuple[mx.array, mx.array]] = []
        visible = _visible(row, columns.places)
        for step in range(columns.steps):
            positions = mx.array(columns.slots(step))
            count = len(positions)
            state = state[:count]
            read = layer.read(embedded[positions], state)
            own = [(key[:count], value[:count]) for key, value in own]
            if step:
                own.append(layer.keys_values(read, positions))
            attended = _attend(layer.queries(read, positions), keys, values, visible[:count], own)
            state = layer.output(state, attended)
            yield self.network.norm(state) @ self._head.T


class _Rows:
    """The network's layer by parts: the queries of a column see what no cache holds, its own rows of other steps."""

    def __init__(self, network: Eagle3) -> None:
        self._layer, self._size = network.midlayer, network.form.head_width

    def read(self, embedded: mx.array, state: mx.array) -> mx.array:
        """(n, 2 width): what the projections read."""
        return mx.concatenate([self._layer.input_layernorm(embedded), self._layer.hidden_norm(state)], axis=-1)

    def keys_values(self, read: mx.array, positions: mx.array) -> tuple[mx.array, mx.array]:
        """(n, heads, size) each."""
        attention: Any = self._layer.self_attn
        return self._rotated(attention.k_proj(read), positions), self._heads(attention.v_proj(read))

    def queries(self, read: mx.array, positions: mx.array) -> mx.array:
        attention: Any = self._layer.self_attn
        return self._rotated(attention.q_proj(read), positions)

    def output(self, state: mx.array, attended: mx.array) -> mx.array:
        """(n, width): the next step's state, and what the norm and the head read."""
        state = state + self._layer.self_attn.o_proj(attended.reshape(len(state), -1))
        return state + self._layer.mlp(self._layer.post_attention_layernorm(state))

    def _heads(self, rows: mx.array) -> mx.array:
        return rows.reshape(len(rows), -1, self._size)

    def _rotated(self, rows: mx.array, positions: mx.array) -> mx.array:
        rope: Any = self._layer.self_attn.rope
        return rope(self._heads(rows)[:, :, None], offset=positions)[:, :, 0]


def _attend(
    queries: mx.array, keys: mx.array, values: mx.array, visible: mx.array, own: list[tuple[mx.array, mx.array]]
) -> mx.array:
    """(n, heads, size). `keys`, `values` (slots, heads, size) of rows with features; `own`: those of the column's own
    rows, (n, heads, size) each. `visible` (n, slots)."""
    queries = queries * queries.shape[-1] ** -0.5
    scores = queries.transpose(1, 0, 2) @ keys.transpose(1, 2, 0)
    scores = mx.where(visible, scores, -mx.inf)
    if own:
        last = mx.stack([(queries * key).sum(-1) for key, _ in own], axis=-1)
        scores = mx.concatenate([scores, last.transpose(1, 0, 2)], axis=-1)
    shares = mx.softmax(scores, axis=-1)
    mixed = (shares[..., : len(keys)] @ values.transpose(1, 0, 2)).transpose(1, 0, 2)
    for number, (_, value) in enumerate(own):
        mixed = mixed + shares[..., len(keys) + number].T[..., None] * value
    return mixed


def _visible(row: Row, places: np.ndarray) -> mx.array:
    """(places, slots): rows of the same text up to the place. A text's first row has no feature in front."""
    slots = np.arange(len(row.tokens))
    seen: Any = (slots <= places[:, None]) & (slots > row.starts[places][:, None])
    return mx.array(seen)


def form(target: Target, head_size: int) -> Eagle3Form:
    """Every query has a key and value of its own: all that a row knows of its own token passes through its values."""
    config = target.config
    heads = target.size("num_attention_heads")
    return Eagle3Form(
        outputs=_outputs(target.layers),
        width=target.width,
        inner=target.size("intermediate_size"),
        heads=heads,
        kv_heads=heads,
        head_width=target.head_width,
        vocabulary=target.vocabulary,
        head_size=head_size,
        output_width=target.width,
        norm_epsilon=target.norm_epsilon,
        rope_base=target.rope_base,
        rope_scaling=target.rope_scaling,
        positions=config.get("max_position_embeddings", 131_072),
        own_head=False,
    )


def start(target: Target, form: Eagle3Form) -> dict[str, mx.array]:
    """Weights to begin with: the target's last layer reads the state, its first layer's attention the embedding.

    `fc` passes the last feature through. Layers that are no Llama's give what they have.
    """
    first, last = target.layer(0), target.layer(target.layers - 1)
    found = {f"midlayer.{name}": weight for name, weight in last.items()} | {"norm.weight": target.norm}
    for name in (f"self_attn.{each}_proj.weight" for each in "qkv"):
        if name in first and name in last:
            parts = [_spread(layer[name], form) for layer in (first, last)]
            found[f"midlayer.{name}"] = mx.concatenate(parts, axis=1)
    found["midlayer.input_layernorm.weight"] = first[_COPIED_NORM]
    found["midlayer.hidden_norm.weight"] = last[_COPIED_NORM]
    unread = mx.zeros((form.width, (len(form.outputs) - 1) * form.output_width))
    found["fc.weight"] = mx.concatenate([unread, mx.eye(form.width)], axis=1)
    return found


def _spread(matrix: mx.array, form: Eagle3Form) -> mx.array:
    """Rows of fewer key-value heads, repeated for every query head."""
    heads = matrix.reshape(-1, form.head_width, matrix.shape[-1])
    return mx.repeat(heads, form.heads // len(heads), axis=0).reshape(-1, matrix.shape[-1])
