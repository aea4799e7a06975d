"""The memory of a model's keys and values, from its config.json. Pure."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from protocol.contracts.model_folder import UNQUANTIZED, KvBits

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_WIDTHS = ("hidden_size", "n_embd", "d_model", "dim", "model_dim", "hidden_dim")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_attention_groups", "num_query_groups")
_HEAD_SIZES = ("head_dim", "kv_channels", "hidden_size_per_head")
_WINDOWS = ("sliding_window", "sliding_window_size", "window_size", "attention_window_size", "attention_chunk_size")
_ABSURD = 1 << 40
"""No size is as large: products of such numbers are beyond a float."""
_GROUP = 64
"""Numbers that share a scale and a bias, where KV is quantized."""
_STEP = 256
"""Rows by which a layer's arrays grow."""
_BEHIND_WINDOW = 2048
"""Rows behind a window that stay, so that a sequence can be cut back."""
LIVE_STATES = 3
"""States of a recurrent layer that a live request needs: that behind the last token, one where the next turn may branch
off, and one that is being made. It remembers more where there is memory."""
_STATES = (
    ("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    ("mamba_n_heads", "mamba_d_head", "mamba_d_state"),
    ("mamba_num_heads", "mamba_head_dim", "ssm_state_size"),
    ("num_heads", "head_dim", "head_dim"),
)
"""Sizes whose product is a recurrent layer's state; the last ones stand in `linear_attn_config`."""
_STATE_BYTES = 4
"""Of an element of a recurrent state."""
_UNFOLDED = ("deepseek_v2", "minicpm3", "youtu_llm")
"""Models with latent keys that mlx-lm unfolds before it keeps them."""
_WITHOUT_GROUPS = ("gpt2", "gpt_neox")
"""Models whose heads share no keys, whatever their config.json states."""
_BOTH = ("falcon_h1",)
"""Models whose layers attend and have a state."""
_DOUBLE = ("iquestloopcoder", "longcat_flash", "longcat_flash_ngram", "nanbeige")
"""Models that attend twice in each layer, or go through their layers twice."""


class KvSizes(NamedTuple):
    """Keys and values of one sequence."""

    full: int
    """Elements of a token in all layers that see every token."""
    windowed: int = 0
    """Elements of a token in all layers with a window."""
    window: int = 0
    """Tokens of the window."""
    state: int = 0
    """Bytes of one state of all recurrent layers, whatever the length."""

    def bytes(self, tokens: int, element: float, windows_whole: bool = False, states: int = LIVE_STATES) -> int:
        """Of one sequence of so many tokens, with `element` bytes a number and so many states. `windows_whole`: rows
        behind windows stay, as they do until they are saved to an arena."""
        rows = -(-tokens // _STEP) * _STEP
        seen = rows if windows_whole else min(rows, self.window + _BEHIND_WINDOW)
        return int((self.full * rows + self.windowed * seen) * element) + states * self.state

    def part(self, share: float) -> "KvSizes":
        """Of a model of which a process holds this share."""
        return KvSizes(int(self.full * share), int(self.windowed * share), self.window, int(self.state * share))


def element_bytes(bits: KvBits, on_processor: bool) -> float:
    """Bytes of one number of KV. Scales and biases have the model's element type."""
    plain = 4 if on_processor else 2
    return float(plain) if bits == UNQUANTIZED else bits / 8 + 2 * plain / _GROUP


def kv_form(config: Mapping[str, Any]) -> KvSizes | None:
    """The form that a config.json states, perhaps with the text model's part; None if it states no sizes."""
    stated = _text(config)
    layers, width, heads = (_first(stated, names) for names in (_LAYERS, _WIDTHS, _HEADS))
    if layers is None or width is None or heads is None:
        return None
    token = _token_elements(stated, width, heads)
    full, windowed, recurrent = _layer_kinds(stated, layers)
    token *= 2 if stated.get("model_type") in _DOUBLE else 1
    window = _first(stated, _WINDOWS) or 0
    if not window:
        full, windowed = full + windowed, 0
    return KvSizes(full * token, windowed * token, window, recurrent * _state(stated))


def attention_heads(config: Mapping[str, Any]) -> int:
    """Heads of a layer; 0 if the config states none."""
    return _first(_text(config), _HEADS) or 0


def keeps_latents(config: Mapping[str, Any]) -> bool:
    """Whether a layer keeps a latent key, which has no heads."""
    stated = _text(config)
    return _first(stated, ("kv_lora_rank",)) is not None and stated.get("model_type") not in _UNFOLDED


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, Mapping) else config


def _token_elements(stated: Mapping[str, Any], width: int, heads: int) -> int:
    """Elements of one token's keys and values in one layer; of a latent key, where a layer keeps that alone."""
    latent = _first(stated, ("kv_lora_rank",))
    rope, index = (_first(stated, (name,)) or 0 for name in ("qk_rope_head_dim", "index_head_dim"))
    if latent is not None and keeps_latents(stated):
        return latent + rope + index * 2
    kv_heads = heads if latent or stated.get("model_type") in _WITHOUT_GROUPS else _first(stated, _KV_HEADS) or heads
    size = rope + (_first(stated, ("qk_nope_head_dim",)) or 0) if latent else 0
    size = size or _first(stated, _HEAD_SIZES) or width // heads
    return kv_heads * (size + (_first(stated, ("v_head_dim",)) or size)) + index * 2


def _layer_kinds(stated: Mapping[str, Any], layers: int) -> tuple[int, int, int]:
    """Layers that see every token, layers with a window, and recurrent ones."""
    pattern = stated.get("hybrid_override_pattern")
    if isinstance(pattern, str | list):
        return pattern.count("*"), 0, pattern.count("M")
    linear = _linear(stated)
    if isinstance(linear.get("kda_layers"), list):
        recurrent = min(layers, len(linear["kda_layers"]))
        return layers - recurrent, 0, recurrent
    if stated.get("model_type") in _BOTH:
        return layers, 0, layers
    kinds = stated.get("layer_types")
    if isinstance(kinds, Sequence) and kinds and all(isinstance(kind, str) for kind in kinds):
        windowed = sum("sliding" in kind or "chunked" in kind for kind in kinds)
        full = sum("full" in kind or "global" in kind or kind in ("attention", "hybrid") for kind in kinds)
        return full, windowed, len(kinds) - full - windowed
    interval = _first(stated, ("full_attention_interval",))
    if interval is not None:
        return layers // interval, 0, layers - layers // interval
    pattern = _first(stated, ("sliding_window_pattern", "_sliding_window_pattern"))
    if pattern is not None:
        return layers // pattern, layers - layers // pattern, 0
    return layers, 0, 0


def _state(stated: Mapping[str, Any]) -> int:
    """Bytes of one recurrent layer's state; 0 where the config states no sizes of it."""
    *outer, last = _STATES
    places = [*((stated, names) for names in outer), (_linear(stated), last)]
    found = (math.prod(_first(part, (name,)) or 0 for name in names) for part, names in places)
    return next(filter(None, found), 0) * _STATE_BYTES


def _linear(stated: Mapping[str, Any]) -> Mapping[str, Any]:
    linear = stated.get("linear_attn_config")
    return linear if isinstance(linear, Mapping) else {}


def _first(stated: Mapping[str, Any], names: Sequence[str]) -> int | None:
    values = (stated.get(name) for name in names)
    return next((value for value in values if type(value) is int and 0 < value < _ABSURD), None)
