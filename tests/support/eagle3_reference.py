"""EAGLE-3's forward, one row after the other in plain numpy, from the description of the paper and the published code.

Rows, not caches: each row keeps its key, value and output, so any path can be computed.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import mlx.core as mx
import numpy as np

from tests.support.block_reference import rotated


class Row(NamedTuple):
    keys: list[Any]
    """Of each layer."""
    values: list[Any]
    output: Any


class Reference:
    """Of a drafter's tensors by SafeAILab's names, and of its config."""

    def __init__(self, tensors: dict[str, Any], config: dict[str, Any]) -> None:
        self._tensors = {name: np.array(values, dtype=np.float64) for name, values in tensors.items()}
        self._config = config

    @classmethod
    def of(cls, folder: Path) -> Self:
        """In any family's form."""
        config = json.loads((folder / "config.json").read_text())
        stored: Any = mx.load(str(folder / "model.safetensors"))
        tensors = {name.replace("layers.0.", "midlayer."): values for name, values in stored.items()}
        return cls(tensors, config | config.get("transformer_layer_config", {}))

    def fuse(self, feature: Any) -> Any:
        if self._config.get("norm_before_fc"):
            feature = self._normed(feature, "input_norm")
        if self._config.get("fc_norm"):
            parts = np.split(feature, sum(name.startswith("fc_norm.") for name in self._tensors))
            feature = np.concatenate([self._normed(part, f"fc_norm.{n}") for n, part in enumerate(parts)])
        return self._linear(feature, "fc")

    def row(self, token: int, hidden: Any, path: Sequence[Row], position: int) -> Row:
        """`hidden`: the fused feature, or the output of the row before. `path`: the rows before this one."""
        embedded = self._normed(self._tensors["embed_tokens.weight"][token], "midlayer.input_layernorm")
        normed = self._normed(hidden, "midlayer.hidden_norm")
        residual = normed if self._config.get("norm_before_residual") else hidden
        keys, values, read = [], [], np.concatenate([embedded, normed])
        for number in range(self._config["num_hidden_layers"]):
            layer = f"layers.{number}." if number else "midlayer."
            if number:
                residual, read = hidden, self._normed(hidden, layer + "input_layernorm")
            query, key, value = self._projected(read, layer, position)
            keys.append(key)
            values.append(value)
            seen = [[*(each[number] for each in column), last] for column, last in self._columns(path, key, value)]
            attended = self._attended(query, np.stack(seen[0]), np.stack(seen[1]))
            hidden = residual + self._linear(attended.reshape(-1), layer + "self_attn.o_proj")
            inner = self._normed(hidden, layer + "post_attention_layernorm")
            gate, up = self._linear(inner, layer + "mlp.gate_proj"), self._linear(inner, layer + "mlp.up_proj")
            hidden = hidden + self._linear(gate / (1 + np.exp(-gate)) * up, layer + "mlp.down_proj")
        return Row(keys, values, self._normed(hidden, "norm") if self._config.get("norm_output") else hidden)

    def _columns(self, path: Sequence[Row], key: Any, value: Any) -> list[tuple[list[Any], Any]]:
        return [([row.keys for row in path], key), ([row.values for row in path], value)]

    def _projected(self, read: Any, layer: str, position: int) -> tuple[Any, Any, Any]:
        query, key, value = (
            self._linear(read, f"{layer}self_attn.{name}_proj").reshape(-1, self._config["head_dim"]) for name in "qkv"
        )
        if layer + "self_attn.q_norm.weight" in self._tensors:
            query, key = (
                self._normed(x, f"{layer}self_attn.{name}_norm") for x, name in zip((query, key), "qk", strict=True)
            )
        theta = self._config["rope_theta"]
        return rotated(query, position, theta), rotated(key, position, theta), value

    def logits(self, row: Row) -> Any:
        hidden = row.output if self._config.get("norm_output") else self._normed(row.output, "norm")
        return self._linear(hidden, "lm_head")

    def _attended(self, query: Any, keys: Any, values: Any) -> Any:
        groups = len(query) // keys.shape[1]
        heads = []
        for number, each in enumerate(query):
            scores = keys[:, number // groups] @ each / np.sqrt(len(each))
            shares = np.exp(scores - scores.max())
            heads.append(shares / shares.sum() @ values[:, number // groups])
        return np.stack(heads)

    def _normed(self, x: Any, name: str) -> Any:
        scale = np.sqrt((x**2).mean(-1, keepdims=True) + self._config["rms_norm_eps"])
        return x / scale * self._tensors[f"{name}.weight"]

    def _linear(self, x: Any, name: str) -> Any:
        return self._tensors[f"{name}.weight"] @ x + self._tensors.get(f"{name}.bias", 0.0)
