"""The network of the block drafters DFlash and DSpark. Knows no files, no trees and no sampling.

DFlash is arXiv 2602.06036 and z-lab/dflash (dflash/model.py), DSpark is deepseek-ai/DeepSpec
(deepspec/modeling/dspark). The embedding and the head are the target's, so they stand outside of it.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.qwen3 import MLP
from mlx_lm.models.rope_utils import initialize_rope

from draft_worker.drafters.block_form import BlockForm
from draft_worker.drafters.markov import MarkovHead, markov_head


class KeysValues(NamedTuple):
    """(B, kv heads, S, head width) each, of one layer; keys are rotated."""

    keys: mx.array
    values: mx.array


class BlockDrafter(nn.Module):
    """`encode` and `keys_values` read the target's features; a call reads the blocks' inputs behind them."""

    def __init__(self, form: BlockForm) -> None:
        super().__init__()
        self.form = form
        self.fc = nn.Linear(len(form.outputs) * form.output_width, form.width, bias=False)
        self.hidden_norm = nn.RMSNorm(form.width, form.norm_epsilon)
        self.layers = [BlockLayer(form) for _ in range(form.layers)]
        self.norm = nn.RMSNorm(form.width, form.norm_epsilon)
        if form.markov is not None:
            self.markov_head: MarkovHead = markov_head(form)
        if form.confidence != "none":
            self.confidence_head = ConfidenceHead(form.width + (form.rank if form.confidence == "markov" else 0))

    def encode(self, features: mx.array) -> mx.array:
        """(B, S, width) context states of (B, S, outputs * output width) features."""
        return self.hidden_norm(self.fc(features))

    def keys_values(self, context: mx.array, positions: mx.array) -> list[KeysValues]:
        """Of every layer, of (B, S, width) context states at (B, S) positions. A token's depend on no other token."""
        return [layer.self_attn.keys_values(context, positions) for layer in self.layers]

    def __call__(
        self,
        embedded: mx.array,
        positions: mx.array,
        context: Sequence[KeysValues],
        visible: Sequence[mx.array | None],
    ) -> mx.array:
        """(B, L, width) states behind the final norm, which the head turns into logits.

        `embedded` (B, L, width) are the embeddings of the blocks' inputs at (B, L) `positions`. `visible`: for each
        layer, whether an input sees each column, (B or 1, 1, L, S + L) bools, the context's columns first, as from
        `visibility`; None: an input sees all.
        """
        hidden = embedded
        for layer, known, mask in zip(self.layers, context, visible, strict=True):
            hidden = layer(hidden, positions, known, mask)
        return self.norm(hidden)

    def visibility(
        self, context: mx.array, positions: mx.array, blocks: mx.array, known: mx.array
    ) -> list[mx.array | None]:
        """For each layer, the argument `visible` of a call.

        `context` (B, S): positions of the context's columns. `positions`, `blocks`, `known` (B, L): of each input, its
        position, the number of its block, and the first position that is no context of its block. An input sees the
        context before `known`, and its own block: all of it, or in a causal layer up to itself. A window bounds the
        context alone. A negative block number is padding, which sees only itself.
        """
        before = context[:, None, :] < known[:, :, None]
        own = blocks[:, :, None] == blocks[:, None, :]
        own = mx.where(blocks[:, :, None] < 0, mx.eye(blocks.shape[1], dtype=mx.bool_), own)
        before = before & (blocks[:, :, None] >= 0)
        masks: dict[int | None, mx.array | None] = {}
        for window in set(self.form.windows) or {None}:
            near, inside = before, own
            if window is not None:
                near = before & (positions[:, :, None] - context[:, None, :] < window)
            if self.form.is_causal(window):
                inside = own & (positions[:, None, :] <= positions[:, :, None])
            masks[window] = mx.concatenate([near, inside], axis=-1)[:, None]
        return [masks[window] for window in self.form.windows or (None,) * self.form.layers]


class BlockLayer(nn.Module):
    """A layer as Qwen3's, whose attention also reads the context."""

    def __init__(self, form: BlockForm) -> None:
        super().__init__()
        self.self_attn = BlockAttention(form)
        self.mlp = MLP(form.width, form.inner)
        self.input_layernorm = nn.RMSNorm(form.width, form.norm_epsilon)
        self.post_attention_layernorm = nn.RMSNorm(form.width, form.norm_epsilon)

    def __call__(
        self, hidden: mx.array, positions: mx.array, context: KeysValues, visible: mx.array | None
    ) -> mx.array:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), positions, context, visible)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class BlockAttention(nn.Module):
    """Queries of the blocks' inputs; keys and values of the context and of the inputs."""

    def __init__(self, form: BlockForm) -> None:
        super().__init__()
        width, head = form.width, form.head_width
        self._head_width = head
        self.q_proj = nn.Linear(width, form.heads * head, bias=form.bias)
        self.k_proj = nn.Linear(width, form.kv_heads * head, bias=form.bias)
        self.v_proj = nn.Linear(width, form.kv_heads * head, bias=form.bias)
        self.o_proj = nn.Linear(form.heads * head, width, bias=form.bias)
        self.q_norm = nn.RMSNorm(head, form.norm_epsilon)
        self.k_norm = nn.RMSNorm(head, form.norm_epsilon)
        self._rope: Callable[..., mx.array] = initialize_rope(
            head,
            form.rope_base,
            traditional=form.rope_interleaved,
            scaling_config=form.rope_scaling,
            max_position_embeddings=form.positions,
        )

    def keys_values(self, states: mx.array, positions: mx.array) -> KeysValues:
        keys = self._rotated(self.k_norm(self._heads(self.k_proj(states))), positions)
        return KeysValues(keys, self._heads(self.v_proj(states)).transpose(0, 2, 1, 3))

    def __call__(
        self, hidden: mx.array, positions: mx.array, context: KeysValues, visible: mx.array | None
    ) -> mx.array:
        queries = self._rotated(self.q_norm(self._heads(self.q_proj(hidden))), positions)
        own = self.keys_values(hidden, positions)
        keys = mx.concatenate([context.keys, own.keys], axis=2)
        values = mx.concatenate([context.values, own.values], axis=2)
        attended = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=self._head_width**-0.5, mask=visible
        )
        return self.o_proj(attended.transpose(0, 2, 1, 3).flatten(2))

    def _heads(self, projected: mx.array) -> mx.array:
        return mx.unflatten(projected, -1, (-1, self._head_width))

    def _rotated(self, x: mx.array, positions: mx.array) -> mx.array:
        """(B, heads, L, head width) of (B, L, heads, head width). `mx.fast.rope` takes an offset per batch row, so
        each token is a batch row of its own."""
        rows = x.reshape(-1, x.shape[2], 1, x.shape[3])
        return self._rope(rows, offset=positions.reshape(-1)).reshape(x.shape).transpose(0, 2, 1, 3)


class ConfidenceHead(nn.Module):
    """Whether a row's guess will be accepted. Kept for other programs: our trees rank by probability."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)

    def __call__(self, states: mx.array) -> mx.array:
        """(...) log odds of (..., width) states."""
        return self.proj(states).squeeze(-1)
