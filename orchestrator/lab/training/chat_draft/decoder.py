"""A network that writes one token a call in many rows at once. Knows no prompts and no sampling."""

# pyright: reportMissingImports=false
# torch is an optional package: see the extra `training`.

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from orchestrator.lab.training.network import Layer, Network, rotate

ROOM = 64
"""Slots by which the cache grows. Its products need whole arrays: a slice would be copied at each step."""


class Decoder:
    """Matrix products are of type `precision`, the residual stream and the output are fp32.

    A row may begin a new text at any slot.
    """

    def __init__(self, network: Network, rows: int, precision: torch.dtype, outputs: Sequence[int] = ()) -> None:
        """`outputs`: layers whose output each step returns, counted from 0."""
        shape = network.shape
        self._network, self._outputs = network, outputs
        self._layers = [joined(layer, precision) for layer in network.layers if isinstance(layer, Layer)]
        self._heads = (shape.kv_heads, shape.heads // shape.kv_heads, shape.head_size)
        empty = torch.zeros(2, rows, shape.kv_heads, 0, shape.head_size, dtype=precision)
        self._caches = [empty for _ in self._layers]

    @torch.no_grad()
    def step(self, tokens: Tensor, slot: int, starts: Tensor) -> Tensor:
        """States (rows, outputs + 1, size): those of `outputs`, and the last one, behind the final norm.

        `starts` are the slots in which the rows' texts begin.
        """
        positions = slot - starts
        angles = self._network.cosine[positions][:, None, None], self._network.sine[positions][:, None, None]
        if slot == self._caches[0].shape[3]:
            self._caches = [functional.pad(cache, (0, 0, 0, ROOM)) for cache in self._caches]
        slots = torch.arange(self._caches[0].shape[3])
        hidden = ((slots < starts[:, None]) | (slots > slot))[:, None, None]
        rows = self._network.embed_tokens(tokens)
        found = []
        for number, (layer, cache) in enumerate(zip(self._layers, self._caches, strict=True)):
            rows = rows + self._attend(layer, rows, cache, slot, angles, hidden)
            gate, up = linear(layer.after_norm(rows), layer.gate_up).chunk(2, -1)
            rows = rows + linear(functional.silu(gate) * up, layer.down).float()
            if number in self._outputs:
                found.append(rows)
        return torch.stack([*found, self._network.norm(rows)], 1)

    def _attend(
        self, layer: "Joined", rows: Tensor, cache: Tensor, slot: int, angles: tuple[Tensor, Tensor], hidden: Tensor
    ) -> Tensor:
        groups, shared, size = self._heads
        joint = linear(layer.before_norm(rows), layer.qkv).view(len(rows), groups * (shared + 2), size)
        queries, keys, values = joint.split((groups * shared, groups, groups), 1)
        queries = rotate(queries.float().view(len(rows), groups, shared, size), *angles).to(cache.dtype)
        cache[0][:, :, slot] = rotate(keys.float()[:, :, None], *angles)[:, :, 0].to(cache.dtype)
        cache[1][:, :, slot] = values
        scores = (queries @ cache[0].transpose(-1, -2)).float() * size**-0.5
        shares = scores.masked_fill(hidden, float("-inf")).softmax(-1).to(cache.dtype)
        return linear((shares @ cache[1]).flatten(1), layer.output).float()


class Joined(NamedTuple):
    """A layer whose parallel matrices are one."""

    before_norm: torch.nn.Module
    qkv: Tensor
    output: Tensor
    after_norm: torch.nn.Module
    gate_up: Tensor
    down: Tensor


def joined(layer: Layer, precision: torch.dtype) -> Joined:
    attention, mlp = layer.self_attn, layer.mlp
    qkv = (attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight)
    return Joined(
        layer.input_layernorm,
        torch.cat(qkv).detach().to(precision),
        attention.o_proj.weight.detach().to(precision),
        layer.post_attention_layernorm,
        torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)).detach().to(precision),
        mlp.down_proj.weight.detach().to(precision),
    )


def linear(rows: Tensor, matrix: Tensor) -> Tensor:
    return functional.linear(rows.to(matrix.dtype), matrix)
