"""A network of the Llama architecture in torch, and its Hugging Face files. Knows nothing of training."""

# pyright: reportMissingImports=false
# torch is an optional package: see the extra `training`.

import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

ROPE_BASE = 10_000.0
EPSILON = 1e-5
QUANTISED_GROUP = 32
TRAINED_CONTEXT = 2048
LONGEST = 4096
"""Positions that have rotary angles."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a network."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    feed_forward: int
    vocabulary: int
    rope_base: float = ROPE_BASE

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads


class Norm(nn.Module):
    """RMS norm."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, rows: Tensor) -> Tensor:
        return functional.rms_norm(rows, (rows.shape[-1],), self.weight, EPSILON)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions, causal."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_size, bias=False)
        self.o_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)

    def forward(self, rows: Tensor, cosine: Tensor, sine: Tensor, mask: Tensor | None) -> Tensor:
        values = self._heads(self.v_proj(rows))
        queries = rotate(self._heads(self.q_proj(rows)), cosine, sine).to(values.dtype)
        keys = rotate(self._heads(self.k_proj(rows)), cosine, sine).to(values.dtype)
        group = self.shape.heads // self.shape.kv_heads
        mixed = functional.scaled_dot_product_attention(
            queries,
            keys.repeat_interleave(group, 1),
            values.repeat_interleave(group, 1),
            attn_mask=mask,
            is_causal=mask is None,
        )
        return self.o_proj(mixed.transpose(1, 2).reshape(rows.shape))

    def _heads(self, rows: Tensor) -> Tensor:
        """(batch, tokens, heads x size) to (batch, heads, tokens, size)."""
        return rows.unflatten(-1, (-1, self.shape.head_size)).transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.feed_forward, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.feed_forward, bias=False)
        self.down_proj = nn.Linear(shape.feed_forward, shape.hidden, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(rows)) * self.up_proj(rows))


class Layer(nn.Module):
    """Attributes have Llama's names, so that the state dict matches the file."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden)
        self.mlp = FeedForward(shape)

    def forward(self, rows: Tensor, cosine: Tensor, sine: Tensor, mask: Tensor | None) -> Tensor:
        rows = rows + self.self_attn(self.input_layernorm(rows), cosine, sine, mask)
        return rows + self.mlp(self.post_attention_layernorm(rows))


class Network(nn.Module):
    """Tokens (batch, tokens) to states; embedding and output share weights."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden)
        frequencies = shape.rope_base ** (-torch.arange(0, shape.head_size, 2).float() / shape.head_size)
        angles = torch.outer(torch.arange(LONGEST).float(), frequencies).repeat(1, 2)
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)
        self._initialise()

    def hidden(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """States behind the final norm. `mask`, (batch, 1, tokens, tokens), tells what a token may attend to."""
        rows, length = self.embed_tokens(tokens), tokens.shape[1]
        for layer in self.layers:
            rows = layer(rows, self.cosine[:length], self.sine[:length], mask)
        return self.norm(rows)

    def _initialise(self) -> None:
        """Standard deviation 0.02; divided by sqrt(2 layers) for projections into the residual stream (GPT-2)."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                adds = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * self.shape.layers) if adds else 0.02)


def rotate(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary positions, halves paired (Su et al. 2021)."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cosine + torch.cat((-second, first), dim=-1) * sine


def save(network: Network, folder: Path) -> None:
    """Write config.json and model.safetensors in fp16."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {f"model.{name}": weight.detach().half().contiguous() for name, weight in network.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config(network.shape), indent=1))


def copy_tokenizer(source: Path, folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder)


def load(folder: Path) -> Network:
    """A network that `save` wrote or MLX quantised in groups of 32, in fp32."""
    fields = json.loads((folder / "config.json").read_text())
    shape = Shape(
        hidden=fields["hidden_size"],
        layers=fields["num_hidden_layers"],
        heads=fields["num_attention_heads"],
        kv_heads=fields["num_key_value_heads"],
        feed_forward=fields["intermediate_size"],
        vocabulary=fields["vocab_size"],
        rope_base=fields["rope_theta"],
    )
    network = Network(shape)
    weights = dequantised(load_file(folder / "model.safetensors"))
    network.load_state_dict({name.removeprefix("model."): weight.float() for name, weight in weights.items()})
    return network


def dequantised(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights in fp32 instead of MLX's affine quantisation: groups of digits, packed into 32 bits, lowest first."""
    result = {name: weight for name, weight in weights.items() if not name.endswith((".scales", ".biases"))}
    for name in [name.removesuffix(".scales") for name in weights if name.endswith(".scales")]:
        packed, scales = weights[f"{name}.weight"].view(torch.int32), weights[f"{name}.scales"].float()
        bits = 32 * packed.shape[1] // (scales.shape[1] * QUANTISED_GROUP)
        shifts = torch.arange(0, 32, bits, dtype=torch.int32)
        digits = (packed[..., None] >> shifts & 2**bits - 1).view(*scales.shape, QUANTISED_GROUP).float()
        biases = weights[f"{name}.biases"].float()
        result[f"{name}.weight"] = (digits * scales[..., None] + biases[..., None]).flatten(1)
    return result


def config(shape: Shape) -> dict[str, object]:
    """The network as Hugging Face's LlamaConfig."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "intermediate_size": shape.feed_forward,
        "vocab_size": shape.vocabulary,
        "rms_norm_eps": EPSILON,
        "rope_theta": shape.rope_base,
        "max_position_embeddings": TRAINED_CONTEXT,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "torch_dtype": "float16",
    }
