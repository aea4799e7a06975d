"""The forward of a block drafter, step by step in numpy, from its published files. Shares no code with the product."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

Floats = NDArray[np.float64]


def rotated(heads: Floats, position: int, theta: float) -> Floats:
    """Each element is rotated with the one half a head further on."""
    half = heads.shape[-1] // 2
    angles = position * theta ** (-np.arange(half) / half)
    first, second = heads[..., :half], heads[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class BlockReference:
    """Reads config.json and model.safetensors of a drafter, and the embedding and the head of its target."""

    def __init__(self, drafter: Path, target: Path) -> None:
        self.config: dict[str, Any] = json.loads((drafter / "config.json").read_text())
        nested = self.config.get("dflash_config", {})
        self.config |= nested
        self.tensors = {k: v.astype(np.float64) for k, v in load_file(drafter / "model.safetensors").items()}
        ends = {k: v.astype(np.float64) for k, v in load_file(target / "model.safetensors").items()}
        self.embedding = ends["model.embed_tokens.weight"]
        self.head = ends["lm_head.weight"]
        self.anchor_predicts = not nested or nested.get("projector_type") == "dspark"

    def rows(self, known: Sequence[int], anchor: int, features: Floats, positions: Sequence[int]) -> Floats:
        """(rows, width) states of a block whose known tokens end at index `anchor`, behind tokens at `positions` with
        these features."""
        block = self.config["block_size"]
        tokens = [*known, *[self.config["mask_token_id"]] * (block - 1)]
        at = [anchor - len(known) + 1 + i for i in range(len(tokens))]
        hidden = [self.embedding[token] * self.config.get("input_embedding_scale", 1.0) for token in tokens]
        context = [self._norm(self.tensors["fc.weight"] @ row, "hidden_norm.weight") for row in features]
        for layer in range(self.config["num_hidden_layers"]):
            hidden = self._layer(layer, hidden, at, context, positions)
        first = len(known) - 1 if self.anchor_predicts else len(known)
        return np.array([self._norm(row, "norm.weight") for row in hidden[first:]])

    def head_logits(self, state: Floats) -> Floats:
        """Before the correction by the token before."""
        logits = self.config.get("output_multiplier", 1.0) * (self.head @ state)
        bound = self.config.get("final_logit_softcapping")
        return logits if bound is None else np.tanh(logits / bound) * bound

    def logits(self, states: Floats, tokens: Sequence[int], *, all_tokens: bool = False) -> Floats:
        """Of the row behind `tokens`, the anchor first: with the correction by the Markov head or the selector.

        Behind a selector the tokens that it does not choose among have -inf, or with `all_tokens` the probability that
        the head gives them.
        """
        row = len(tokens) - 1
        logits = self.head_logits(states[row])
        if "selector_top_k" in self.config:
            return self._selected(logits, states[row], tokens[-1], all_tokens)
        if not self.config.get("markov_rank"):
            return logits
        w1, w2 = self.tensors["markov_head.markov_w1.weight"], self.tensors["markov_head.markov_w2.weight"]
        match self.config["markov_head_type"]:
            case "vanilla":
                latent = w1[tokens[-1]]
            case "gated":
                joined = np.concatenate([states[row], w1[tokens[-1]]])
                latent = _sigmoid(self._linear("markov_head.gate_proj", joined)) * w1[tokens[-1]]
            case _:
                state = np.zeros(w1.shape[1])
                latent = state
                for token, hidden in zip(tokens, states, strict=False):
                    joined = np.concatenate([state, w1[token], hidden])
                    gate, candidate, output = np.split(self._linear("markov_head.joint_proj", joined), 3)
                    state = _sigmoid(gate) * state + (1 - _sigmoid(gate)) * np.tanh(candidate)
                    latent = np.tanh(output)
        return logits + w2 @ latent

    def _selected(self, logits: Floats, state: Floats, before: int, all_tokens: bool) -> Floats:
        projected = self.tensors["candidate_selector.hidden_projection.weight"] @ state
        predecessor = self.tensors["candidate_selector.predecessor_codebook"][before]
        best = np.argsort(-logits, kind="stable")[: self.config["selector_top_k"]]
        scores = np.full(len(logits), -np.inf)
        for token in best:
            successor = self.tensors["candidate_selector.successor_codebook"][token]
            scores[token] = logits[token] + (predecessor * projected) @ successor
        if not all_tokens:
            return scores
        share = np.exp(scores[best]) / np.exp(scores[best]).sum()
        spread = logits.copy()
        spread[best] = np.log(share * np.exp(logits[best]).sum())
        return spread

    def _convolved(self, rows: list[Floats], kernels: list[Floats], side: int, name: str) -> list[Floats]:
        """A row is a sum over itself and the rows before it in the block."""
        base = self.tensors[f"{name}.base_kernel"][side]
        group = self.config["conv_group_size"]
        result = []
        for at, kernel in enumerate(kernels):
            added = kernel.reshape(2, len(base), -1)[side]
            total = np.zeros(len(rows[0]))
            for back in range(min(at + 1, len(base))):
                total += (base[back] + np.repeat(added[back], group)) * rows[at - back]
            result.append(total)
        return result

    def _kernels(self, rows: list[Floats], name: str) -> list[Floats] | None:
        weight = self.tensors.get(f"{name}.kernel_projection.weight")
        return None if weight is None else [weight @ row for row in rows]

    def _layer(
        self, layer: int, hidden: list[Floats], at: Sequence[int], context: list[Floats], positions: Sequence[int]
    ) -> list[Floats]:
        name = f"layers.{layer}"
        normed = [self._norm(row, f"{name}.input_layernorm.weight") for row in hidden]
        kernels = self._kernels(normed, f"{name}.attention_conv")
        if kernels is not None:
            normed = self._convolved(normed, kernels, 0, f"{name}.attention_conv")
        keys, values, theta = [], [], self.config["rope_theta"]
        for source, place in [*zip(context, positions, strict=True), *zip(normed, at, strict=True)]:
            keys.append(rotated(self._heads(f"{name}.self_attn", "k", source), place, theta))
            values.append(self._split(self.tensors[f"{name}.self_attn.v_proj.weight"] @ source))
        places = [*positions, *at]
        attended = []
        for row, source in enumerate(normed):
            last = row if self._causal(layer) else len(at)
            block = range(len(context), min(len(context) + last + 1, len(places)))
            seen = [*(i for i, place in enumerate(positions) if self._near(layer, at[row], place)), *block]
            query = rotated(self._heads(f"{name}.self_attn", "q", source), at[row], theta)
            group = len(query) // len(keys[0])
            heads = []
            for head, vector in enumerate(query):
                scores = np.array([keys[i][head // group] @ vector for i in seen]) / np.sqrt(len(vector))
                weights = np.exp(scores - scores.max())
                heads.append(
                    sum(w * values[i][head // group] for w, i in zip(weights / weights.sum(), seen, strict=True))
                )
            attended.append(self.tensors[f"{name}.self_attn.o_proj.weight"] @ np.concatenate(heads))
        if kernels is not None:
            attended = self._convolved(attended, kernels, 1, f"{name}.attention_conv")
        mixed = [residual + row for residual, row in zip(hidden, attended, strict=True)]
        inner = [self._norm(row, f"{name}.post_attention_layernorm.weight") for row in mixed]
        kernels = self._kernels(inner, f"{name}.mlp_conv")
        if kernels is not None:
            inner = self._convolved(inner, kernels, 0, f"{name}.mlp_conv")
        fed = []
        for row in inner:
            gate, up = (self.tensors[f"{name}.mlp.{part}_proj.weight"] @ row for part in ("gate", "up"))
            fed.append(self.tensors[f"{name}.mlp.down_proj.weight"] @ (gate * _sigmoid(gate) * up))
        if kernels is not None:
            fed = self._convolved(fed, kernels, 1, f"{name}.mlp_conv")
        return [row + each for row, each in zip(mixed, fed, strict=True)]

    def _near(self, layer: int, query: int, key: int) -> bool:
        sliding = self.config["layer_types"][layer] == "sliding_attention" or self.config.get("use_swa")
        window = self.config["swa_window_size" if self.config.get("use_swa") else "sliding_window"] if sliding else None
        return window is None or query - key < window

    def _causal(self, layer: int) -> bool:
        sliding = self.config["layer_types"][layer] == "sliding_attention"
        return self.config.get("is_causal", self.config.get("causal", sliding))

    def _heads(self, attention: str, kind: str, source: Floats) -> Floats:
        heads = self._split(self.tensors[f"{attention}.{kind}_proj.weight"] @ source)
        return np.array([self._norm(head, f"{attention}.{kind}_norm.weight") for head in heads])

    def _split(self, projected: Floats) -> Floats:
        return projected.reshape(-1, self.config["head_dim"])

    def _norm(self, vector: Floats, weight: str) -> Floats:
        return vector / np.sqrt(np.mean(vector**2) + self.config["rms_norm_eps"]) * self.tensors[weight]

    def _linear(self, name: str, vector: Floats) -> Floats:
        return self.tensors[f"{name}.weight"] @ vector + self.tensors[f"{name}.bias"]


def _sigmoid(x: Floats) -> Floats:
    return 1 / (1 + np.exp(-x))
