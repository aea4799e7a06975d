"""Models small enough to make in a test, with random weights, and what stock mlx-lm says about them."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import llama, qwen2, qwen3
from mlx_lm.models.cache import make_prompt_cache

from protocol.inference.language_model import LanguageModel
from protocol.inference.quantized_kv import deviation

VOCABULARY = 67
ELEMENT: mx.Dtype = getattr(mx, os.environ.get("TEST_ELEMENT", "float32"))
"""Of all tiny networks."""
ROUNDING = 0.05
"""Mean deviation of logits that half precision explains, in standard deviations."""
_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ARCHITECTURES = ("llama", "llama with llama3 rope", "qwen2", "qwen3")


def network(architecture: str = "llama", seed: int = 0, **changes: Any) -> Any:
    """A stock mlx-lm model with weights large enough for its context to matter."""
    mx.random.seed(seed)
    sizes = _SIZES | changes
    match architecture:
        case "llama":
            model = llama.Model(llama.ModelArgs(model_type="llama", **sizes))
        case "llama with llama3 rope":
            model = llama.Model(llama.ModelArgs(model_type="llama", rope_scaling=_LLAMA3_ROPE, **sizes))
        case "qwen2":
            model = qwen2.Model(qwen2.ModelArgs(model_type="qwen2", **sizes))
        case _:
            model = qwen3.Model(qwen3.ModelArgs(model_type="qwen3", head_dim=8, **sizes))
    model.update(tree_map(lambda weights: weights * 2.5 if weights.ndim == 2 else weights, model.parameters()))
    model.set_dtype(ELEMENT)
    mx.eval(model.parameters())
    return model


def write_model(folder: Path, model: Any, **config: Any) -> Path:
    """The folder of a stock mlx-lm model, without a tokenizer; `config`: further fields of its config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    stated = {name: value for name, value in vars(model.args).items() if value is not None} | config
    (folder / "config.json").write_text(json.dumps(stated))
    return folder


def tree_model(architecture: str = "llama", seed: int = 0, **changes: Any) -> LanguageModel:
    return LanguageModel(network(architecture, seed, **changes))


def stock_logits(model: Any, tokens: Sequence[int]) -> mx.array:
    """(V,) logits behind `tokens`, as mlx-lm computes them."""
    return model(mx.array([list(tokens)]), cache=make_prompt_cache(model))[0, -1]


def alike(logits: mx.array, expected: mx.array, most: float = 1e-3) -> bool:
    """Whether they differ by rounding alone: by `most` of a standard deviation in float32."""
    return deviation(logits, expected) < (most if ELEMENT.size == 4 else ROUNDING)


def greedy(model: Any, prompt: Sequence[int], count: int = 12) -> list[int]:
    """The prompt, and so many tokens behind it as stock mlx-lm continues it."""
    tokens = list(prompt)
    for _ in range(count):
        best: Any = mx.argmax(stock_logits(model, tokens)).item()
        tokens.append(int(best))
    return tokens
