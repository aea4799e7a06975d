"""The block drafters DFlash, DSpark and DFlash2: network, heads and published files. Knows no trees and no sampling.

DFlash is arXiv 2602.06036 and z-lab/dflash (dflash/model.py), DSpark is deepseek-ai/DeepSpec
(deepspec/modeling/dspark). The embedding and the head are the target's, so they stand outside of it. The three Markov
heads are those of DeepSpec's markov_head.py: a row's logits are those of the block's forward plus `correction(latent)`,
where the latent comes of the token before the row.

DFlash2 (vllm-project/vllm: qwen3_dflash2.py, vllm-project/speculators: models/dflash2) adds short convolutions round
the two parts of a layer, and a selector, which corrects a row's best tokens by the token before the row.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.qwen3 import MLP
from mlx_lm.models.rope_utils import initialize_rope

from draft_worker.drafters.files import DrafterFolder
from draft_worker.drafters.token_ends import TokenEnds
from draft_worker.short_head import HeadTokens
from protocol.contracts.drafters.description import BlockForm


class KeysValues(NamedTuple):
    """(B, kv heads, S, head width) each, of one layer; keys are rotated."""

    keys: mx.array
    values: mx.array


class BlockPart(NamedTuple):
    """Inputs of a call that belong to one sequence, beside one another, and what they see."""

    inputs: int
    context: Sequence[KeysValues]
    """Of every layer."""
    visible: Sequence[mx.array | None]
    """For each layer, whether an input sees each column, (B or 1, 1, inputs, S + inputs) bools, the context's columns
    first, as from `visibility`; None: an input sees all."""


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
        if form.choices:
            self.candidate_selector = ChoiceSelector(form)

    def encode(self, features: mx.array) -> mx.array:
        """(B, S, width) context states of (B, S, outputs * output width) features."""
        return self.hidden_norm(self.fc(features))

    def keys_values(self, context: mx.array, positions: mx.array) -> list[KeysValues]:
        """Of every layer, of (B, S, width) context states at (B, S) positions. A token's depend on no other token."""
        return [layer.self_attn.keys_values(context, positions) for layer in self.layers]

    def __call__(
        self, embedded: mx.array, positions: mx.array, parts: Sequence[BlockPart], blocks: mx.array | None = None
    ) -> mx.array:
        """(B, L, width) states behind the final norm, which the head turns into logits.

        `embedded` (B, L, width) are the embeddings of the blocks' inputs at (B, L) `positions`, those of each of
        `parts` behind one another. `blocks` (B, L): the number of each input's block; None: all are of one.
        """
        form, hidden = self.form, embedded
        if form.input_scale != 1.0:
            hidden = hidden * form.input_scale
        before = _same_block(blocks, form.taps)
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden, positions, parts, number, before)
        return self.norm(hidden)

    def logits(self, states: mx.array, head: Callable[[mx.array], mx.array]) -> mx.array:
        """(..., head) of (..., width) states, before any correction by the token before."""
        logits = head(states)
        if self.form.logit_scale != 1.0:
            logits = logits * self.form.logit_scale
        bound = self.form.soft_cap
        return logits if bound is None else mx.tanh(logits / bound) * bound

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


def _same_block(blocks: mx.array | None, taps: int) -> list[mx.array | None]:
    """For 1, 2, ... up to `taps` - 1 inputs back, whether that input is of the same block: (B, L - back, 1) bools, of
    the inputs from `back` on; None: each is."""
    if blocks is None:
        return [None] * (taps - 1)
    return [(blocks[:, back:] == blocks[:, :-back])[..., None] for back in range(1, taps)]


class BlockLayer(nn.Module):
    """A layer as Qwen3's, whose attention also reads the context."""

    def __init__(self, form: BlockForm) -> None:
        super().__init__()
        self.self_attn = BlockAttention(form)
        self.mlp = MLP(form.width, form.inner)
        self.input_layernorm = nn.RMSNorm(form.width, form.norm_epsilon)
        self.post_attention_layernorm = nn.RMSNorm(form.width, form.norm_epsilon)
        self._convolves = form.taps > 0
        if self._convolves:
            self.attention_conv = ShortConvolution(form)
            self.mlp_conv = ShortConvolution(form)

    def __call__(
        self,
        hidden: mx.array,
        positions: mx.array,
        parts: Sequence[BlockPart],
        number: int,
        before: Sequence[mx.array | None],
    ) -> mx.array:
        """`number`: of the layer."""

        def attended(normed: mx.array) -> mx.array:
            return self.self_attn(normed, positions, parts, number)

        normed = self.input_layernorm(hidden)
        hidden = hidden + (self.attention_conv(normed, attended, before) if self._convolves else attended(normed))
        normed = self.post_attention_layernorm(hidden)
        return hidden + (self.mlp_conv(normed, self.mlp, before) if self._convolves else self.mlp(normed))


class ShortConvolution(nn.Module):
    """Two convolutions along a block, before and behind a part of a layer.

    The kernel of an input is the learned one plus what the input itself adds, alike for a group of elements. Both
    kernels come of the input before the first convolution.
    """

    def __init__(self, form: BlockForm) -> None:
        super().__init__()
        self._taps, self._group = form.taps, form.tap_group
        identity = mx.zeros((2, form.taps, form.width))
        identity[:, 0] = 1.0
        self.base_kernel = identity
        self.kernel_projection = nn.Linear(form.width, 2 * form.taps * (form.width // form.tap_group), bias=False)

    def __call__(
        self, hidden: mx.array, between: Callable[[mx.array], mx.array], before: Sequence[mx.array | None]
    ) -> mx.array:
        """`before`: as from `_same_block`."""
        added = mx.unflatten(self.kernel_projection(hidden), -1, (2, self._taps, -1, 1))
        return self._convolved(between(self._convolved(hidden, 0, added, before)), 1, added, before)

    def _convolved(self, hidden: mx.array, side: int, added: mx.array, before: Sequence[mx.array | None]) -> mx.array:
        grouped = mx.unflatten(hidden, -1, (-1, self._group))
        base = mx.unflatten(self.base_kernel[side], -1, (-1, self._group))
        total = (base[0] + added[..., side, 0, :, :]) * grouped
        for back, same in enumerate(before, start=1):
            earlier = grouped[:, :-back]
            if same is not None:
                earlier = mx.where(same[..., None], earlier, 0)
            earlier = mx.pad(earlier, [(0, 0), (back, 0), (0, 0), (0, 0)])
            total = total + (base[back] + added[..., side, back, :, :]) * earlier
        return total.flatten(-2)


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

    def __call__(self, hidden: mx.array, positions: mx.array, parts: Sequence[BlockPart], layer: int) -> mx.array:
        queries = self._rotated(self.q_norm(self._heads(self.q_proj(hidden))), positions)
        own = self.keys_values(hidden, positions)
        attended, first = [], 0
        for count, contexts, visible in parts:
            part, context = slice(first, first + count), contexts[layer]
            keys = mx.concatenate([context.keys, own.keys[:, :, part]], axis=2)
            values = mx.concatenate([context.values, own.values[:, :, part]], axis=2)
            attended.append(
                mx.fast.scaled_dot_product_attention(
                    queries[:, :, part], keys, values, scale=self._head_width**-0.5, mask=visible[layer]
                )
            )
            first += count
        together = attended[0] if len(attended) == 1 else mx.concatenate(attended, axis=2)
        return self.o_proj(together.transpose(0, 2, 1, 3).flatten(2))

    def _heads(self, projected: mx.array) -> mx.array:
        return mx.unflatten(projected, -1, (-1, self._head_width))

    def _rotated(self, x: mx.array, positions: mx.array) -> mx.array:
        """(B, heads, L, head width) of (B, L, heads, head width). `mx.fast.rope` takes an offset per batch row, so
        each token is a batch row of its own."""
        rows = x.reshape(-1, x.shape[2], 1, x.shape[3])
        return self._rope(rows, offset=positions.reshape(-1)).reshape(x.shape).transpose(0, 2, 1, 3)


def markov_head(form: BlockForm, tokens: int | None = None) -> "MarkovHead":
    """The head that the form states. `tokens`: how many it corrects; None: the whole vocabulary."""
    match form.markov:
        case "gated":
            return GatedMarkovHead(form, tokens)
        case "rnn":
            return RecurrentMarkovHead(form, tokens)
        case _:
            return MarkovHead(form, tokens)


class MarkovHead(nn.Module):
    """A correction by the token before alone, of limited rank."""

    def __init__(self, form: BlockForm, tokens: int | None = None) -> None:
        super().__init__()
        self._rank = form.rank
        self.markov_w1 = nn.Embedding(form.vocabulary, form.rank)
        self.markov_w2 = nn.Linear(form.rank, tokens or form.vocabulary, bias=False)

    def initial(self, count: int) -> mx.array:
        """(count, rank) states before the first row of a block."""
        return mx.zeros((count, self._rank), self.markov_w1.weight.dtype)

    def step(self, state: mx.array, tokens: mx.array, hidden: mx.array) -> tuple[mx.array, mx.array]:
        """The states behind a row, and the (..., rank) latents of its correction.

        `tokens` (...): those before the row. `hidden` (..., width): the row's states behind the final norm.
        """
        return state, self.markov_w1(tokens)

    def correction(self, latent: mx.array) -> mx.array:
        """(..., head) numbers to add to a row's logits."""
        return self.markov_w2(latent)


class GatedMarkovHead(MarkovHead):
    """The row's state decides how much of the token's vector counts."""

    def __init__(self, form: BlockForm, tokens: int | None = None) -> None:
        super().__init__(form, tokens)
        self.gate_proj = nn.Linear(form.width + form.rank, form.rank)

    def step(self, state: mx.array, tokens: mx.array, hidden: mx.array) -> tuple[mx.array, mx.array]:
        vector = self.markov_w1(tokens)
        return state, mx.sigmoid(self.gate_proj(mx.concatenate([hidden, vector], axis=-1))) * vector


class RecurrentMarkovHead(MarkovHead):
    """A recurrent state sees all tokens of the block so far."""

    def __init__(self, form: BlockForm, tokens: int | None = None) -> None:
        super().__init__(form, tokens)
        self.joint_proj = nn.Linear(2 * form.rank + form.width, 3 * form.rank)

    def step(self, state: mx.array, tokens: mx.array, hidden: mx.array) -> tuple[mx.array, mx.array]:
        joined = mx.concatenate([state, self.markov_w1(tokens), hidden], axis=-1)
        gate, candidate, output = mx.split(self.joint_proj(joined), 3, axis=-1)
        gate = mx.sigmoid(gate)
        return gate * state + (1 - gate) * mx.tanh(candidate), mx.tanh(output)


class ChoiceSelector(nn.Module):
    """Corrects the logits of a row's best tokens by the token before the row.

    The score of a token b behind a token a is its logit plus <predecessor(a) * projection(state), successor(b)>.
    """

    def __init__(self, form: BlockForm) -> None:
        super().__init__()
        spread = form.rank**-0.5
        self.predecessor_codebook = mx.random.normal((form.vocabulary, form.rank), scale=spread)
        self.successor_codebook = mx.random.normal((form.vocabulary, form.rank), scale=spread)
        self.hidden_projection = nn.Linear(form.width, form.rank, bias=False)


_ENDS = ("embed_tokens", "lm_head")
_CONFIDENCE = "confidence_head"


class BlockCheckpoint(NamedTuple):
    """A drafter from its files."""

    network: BlockDrafter
    ends: TokenEnds | None
    """Its own copies of the target's embedding and head; None: the target's."""
    head_tokens: HeadTokens | None
    """Those of the columns of head and Markov head; None: column c is token c."""


def read_block(folder: Path) -> BlockCheckpoint:
    """Raises InputError for files that are missing, damaged or of another form."""
    found = DrafterFolder(folder, BlockForm)
    form, tensors = found.form, found.tensors()
    named = found.head_tokens(tensors, form.vocabulary, ("lm_head.", "markov_head.markov_w2."))
    count = form.vocabulary if named is None else len(named)
    own = {name: values for name, values in tensors.items() if name.split(".")[0] in _ENDS}
    # Our trees rank by probability, so the confidence head that some have is not read.
    tensors = {name: values for name, values in tensors.items() if name.split(".")[0] not in (*_ENDS, _CONFIDENCE)}
    try:
        network = BlockDrafter(form)
        if form.markov and named is not None:
            network.markov_head = markov_head(form, len(named))
        found.fill(network, tensors)
        # Some ropes read their options when they are called.
        states = mx.zeros((1, 1, form.width), network.norm.weight.dtype)
        mx.eval(network.layers[0].self_attn.keys_values(states, mx.zeros((1, 1), mx.int32)))
    except (ValueError, LookupError, TypeError, ArithmeticError, RuntimeError) as error:
        raise found.wrong(f"its config.json states a rotary embedding that is not known ({error})") from error
    ends = None
    if {name.split(".")[0] for name in own} == {*_ENDS}:
        copies = _OwnEnds(form, count)
        found.fill(copies, own)
        copies.set_dtype(network.norm.weight.dtype)
        ends = TokenEnds.of(copies.embed_tokens, copies.lm_head)
    if named is not None and ends is None:
        raise found.wrong("it names the tokens of a reduced head (d2t) and lacks embed_tokens.weight or lm_head.weight")
    return BlockCheckpoint(network, ends, named)


class _OwnEnds(nn.Module):
    """Copies of the target's embedding and head."""

    def __init__(self, form: BlockForm, columns: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(form.vocabulary, form.width)
        self.lm_head = nn.Linear(form.width, columns, bias=False)
