"""EAGLE-3 (arXiv 2503.01840): decoder layers over the next token's embedding and the target's features, and its files.

Mostly one layer. The further ones, which speculators' files can have, are plain. Parameters have the published names,
but that `layers` begins with the second. Knows no engine, no trees and no sampling.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import mlx.core as mx
import mlx.nn as nn
import msgspec
from mlx_lm.models.activations import swiglu
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention
from mlx_lm.models.cache import KVCache
from mlx_lm.models.rope_utils import initialize_rope

from draft_worker.drafters.files import DrafterFolder
from draft_worker.drafters.token_ends import TokenEnds, drafter_ends
from draft_worker.short_head import HeadTokens, read_head_tokens
from protocol.contracts.drafters.description import Eagle3Form
from protocol.contracts.drafters.eagle3 import network_name, published_name

Mask: TypeAlias = mx.array | str | None
Ends: TypeAlias = Callable[[mx.array], mx.array]
"""A target's embedding or head."""


class Eagle3(nn.Module):
    """Row i joins the feature of token i with the embedding of token i + 1, and predicts token i + 2."""

    def __init__(self, form: Eagle3Form, head_tokens: HeadTokens | None = None) -> None:
        """`head_tokens`: those of the head's columns; None: column c is token c."""
        super().__init__()
        self.form = form
        self.head_tokens = head_tokens
        self._embed: Ends | None = None
        self._head: Ends | None = None
        width, eps = form.width, form.norm_epsilon
        joined = len(form.outputs) * form.output_width
        if form.own_embedding:
            self.embed_tokens = nn.Embedding(form.vocabulary, width)
        if form.norm_before_fc:
            self.input_norm = nn.RMSNorm(joined, eps=eps)
        if form.fc_norm:
            self.fc_norm = [nn.RMSNorm(form.output_width, eps=eps) for _ in form.outputs]
        self.fc = nn.Linear(joined, width, bias="fc" in form.biases)
        if form.mask_token is not None:
            self.mask_hidden = mx.zeros((1, 1, joined))
        self.midlayer = Eagle3Layer(form, "midlayer", 2 * width)
        self.layers = [Eagle3PlainLayer(form, f"layers.{number}", width) for number in range(form.layers - 1)]
        self.norm = nn.RMSNorm(width, eps=eps)
        if form.own_head:
            self.lm_head = nn.Linear(width, form.head_size, bias=False)

    def borrow(self, embed: Ends, head: Ends) -> None:
        """Use the target's embedding and head where the drafter has none of its own."""
        self._embed, self._head = embed, head

    def fuse(self, features: mx.array) -> mx.array:
        """(..., hidden) from (..., outputs * target_width) features."""
        form = self.form
        if form.norm_before_fc:
            features = self.input_norm(features)
        if form.fc_norm:
            parts = mx.split(features, len(form.outputs), axis=-1)
            features = mx.concatenate([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], axis=-1)
        return self.fc(features)

    def __call__(self, tokens: mx.array, hidden: mx.array, mask: Mask = None, cache: Any = None) -> mx.array:
        """What the next row may read in place of `hidden`: (B, L, hidden), from (B, L) tokens and the (B, L, hidden)
        fused feature of the token before each.

        `cache`: for keys and values of earlier rows, any object with `offset` and `update_and_fetch`, or a list of them
        by layer. Without a mask, rows are causal, or see what the cache's `make_mask` says.
        """
        caches = cache if isinstance(cache, list) else [cache] * self.form.layers
        if mask is None:
            mask = create_attention_mask(hidden, caches[0])
        embed = self.embed_tokens if self.form.own_embedding else self._embed
        assert embed is not None, "the target's embedding was not given"
        hidden = self.midlayer(embed(tokens), hidden, mask, caches[0])
        for layer, each in zip(self.layers, caches[1:], strict=True):
            hidden = layer(hidden, mask, each)
        return self.norm(hidden) if self.form.norm_output else hidden

    def logits(self, hidden: mx.array) -> mx.array:
        """(..., head_size), from outputs of the network."""
        head = self.lm_head if self.form.own_head else self._head
        assert head is not None, "the target's head was not given"
        return head(hidden if self.form.norm_output else self.norm(hidden))

    def make_cache(self) -> list[KVCache]:
        return [KVCache() for _ in range(self.form.layers)]


class _Eagle3Parts(nn.Module):
    """Of a layer called `name`, whose attention reads `rows` numbers of each token."""

    def __init__(self, form: Eagle3Form, name: str, rows: int) -> None:
        super().__init__()
        width, eps = form.width, form.norm_epsilon
        self.self_attn = Eagle3Attention(form, name, rows)
        self.mlp = Eagle3Mlp(form, name)
        self.input_layernorm = nn.RMSNorm(width, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=eps)


class Eagle3Layer(_Eagle3Parts):
    """A decoder layer whose attention reads embedding and feature side by side."""

    def __init__(self, form: Eagle3Form, name: str, rows: int) -> None:
        super().__init__(form, name, rows)
        self.hidden_norm = nn.RMSNorm(form.width, eps=form.norm_epsilon)
        self._norm_before_residual = form.norm_before_residual

    def __call__(self, embedded: mx.array, hidden: mx.array, mask: Mask, cache: Any) -> mx.array:
        normed = self.hidden_norm(hidden)
        joined = mx.concatenate([self.input_layernorm(embedded), normed], axis=-1)
        residual = normed if self._norm_before_residual else hidden
        hidden = residual + self.self_attn(joined, mask, cache)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3PlainLayer(_Eagle3Parts):
    """A decoder layer as Llama's or Qwen's."""

    def __call__(self, hidden: mx.array, mask: Mask, cache: Any) -> mx.array:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), mask, cache)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3Attention(nn.Module):
    """Of rows of `width` numbers."""

    def __init__(self, form: Eagle3Form, layer: str, width: int) -> None:
        super().__init__()
        self._heads, self._kv_heads, size = form.heads, form.kv_heads, form.head_width
        self._scale = size**-0.5
        keys = form.kv_heads * size
        self.q_proj = nn.Linear(width, form.heads * size, bias=f"{layer}.self_attn.q_proj" in form.biases)
        self.k_proj = nn.Linear(width, keys, bias=f"{layer}.self_attn.k_proj" in form.biases)
        self.v_proj = nn.Linear(width, keys, bias=f"{layer}.self_attn.v_proj" in form.biases)
        self.o_proj = nn.Linear(form.heads * size, form.width, bias=f"{layer}.self_attn.o_proj" in form.biases)
        if form.norm_heads:
            self.q_norm = nn.RMSNorm(size, eps=form.norm_epsilon)
            self.k_norm = nn.RMSNorm(size, eps=form.norm_epsilon)
        self._normed = form.norm_heads
        scaling = None if form.rope_scaling is None else dict(form.rope_scaling)
        self.rope = initialize_rope(size, form.rope_base, False, scaling, form.positions)

    def __call__(self, x: mx.array, mask: Any, cache: Any) -> mx.array:
        batch, length, _ = x.shape
        queries = self.q_proj(x).reshape(batch, length, self._heads, -1)
        keys = self.k_proj(x).reshape(batch, length, self._kv_heads, -1)
        values = self.v_proj(x).reshape(batch, length, self._kv_heads, -1).transpose(0, 2, 1, 3)
        if self._normed:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        queries, keys = queries.transpose(0, 2, 1, 3), keys.transpose(0, 2, 1, 3)
        offset = 0 if cache is None else cache.offset
        queries, keys = self.rope(queries, offset=offset), self.rope(keys, offset=offset)
        if cache is not None:
            keys, values = cache.update_and_fetch(keys, values)
        attended = scaled_dot_product_attention(queries, keys, values, cache=cache, scale=self._scale, mask=mask)
        return self.o_proj(attended.transpose(0, 2, 1, 3).reshape(batch, length, -1))


class Eagle3Mlp(nn.Module):
    def __init__(self, form: Eagle3Form, layer: str) -> None:
        super().__init__()
        width, inner = form.width, form.inner
        self.gate_proj = nn.Linear(width, inner, bias=f"{layer}.mlp.gate_proj" in form.biases)
        self.up_proj = nn.Linear(width, inner, bias=f"{layer}.mlp.up_proj" in form.biases)
        self.down_proj = nn.Linear(inner, width, bias=f"{layer}.mlp.down_proj" in form.biases)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


def read_eagle3(folder: Path, target: Path | None = None) -> Eagle3:
    """The network in `folder`. `target`: the folder of its target, on whose depth default outputs depend.

    Raises InputError for files that are missing, damaged or of another form, and for another target.
    """
    found = DrafterFolder(folder, Eagle3Form)
    form, given = found.form, found.tensors()
    if target is not None:
        outputs = found.drafter.outputs(found.drafter.fitting(folder, target))
        form = msgspec.structs.replace(form, outputs=outputs)
    if not form.outputs:
        raise found.wrong("its config.json names no layers of the target, and neither does a target say how many")
    tensors = {network_name(name): values for name, values in given.items()}
    head_tokens = found.head_tokens(tensors, form.vocabulary)
    if head_tokens is None and not form.own_head:
        head_tokens = read_head_tokens(folder, form.vocabulary)
    named = form.vocabulary if head_tokens is None else len(head_tokens)
    if form.head_size != named:
        raise found.wrong(f"its head has {form.head_size} tokens, and d2t or the vocabulary names {named}")
    try:
        network = Eagle3(form, head_tokens)
    except (ValueError, KeyError, TypeError, ArithmeticError, AssertionError) as error:
        raise found.wrong(f"its config.json states rotary positions that can't be computed ({error!r})") from error
    first = "midlayer" if "midlayer.self_attn.q_proj.weight" in given else "layers.0"
    found.fill(network, tensors, lambda name: published_name(name, first))
    return network


def borrow_ends(network: Eagle3, folder: Path, target: Path | None) -> TokenEnds | None:
    """Let the network use the target's embedding and head where it has none; None: it has both.

    Raises InputError if `target` is wanted and None, or another model.
    """
    form = network.form
    if form.own_embedding and form.own_head:
        return None
    tokens, sizes = None if form.own_head else network.head_tokens, (form.width, form.vocabulary)
    element = network.norm.weight.dtype
    ends = drafter_ends(folder, None, target, *sizes, element, head=not form.own_head, head_tokens=tokens)
    network.borrow(ends.embed, ends.head)
    return ends
