"""Folders of tiny random EAGLE-3 drafters, all of whose inputs matter, in the form of each published family."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import mlx.core as mx

from tests.support.models.drafter_files import DRAFTED, FORMATS, HEAD, VOCABULARY

HEAD_TOKENS = tuple(token for token in range(VOCABULARY) if token % 5 not in (1, 3))
MASK_TOKEN, DEPTHS = VOCABULARY - 1, 6
"""Of P-EAGLE."""
assert len(HEAD_TOKENS) == DRAFTED
_NONE: Mapping[str, tuple[int, ...]] = MappingProxyType({})


def published(form: str, folder: Path, added: Mapping[str, tuple[int, ...]] = _NONE, **changes: Any) -> Path:
    """`form`: one of `FORMATS`. `added`: shapes of further tensors. `changes`: of config.json."""
    config, shapes = FORMATS[form]()
    return write(folder, config | changes, tensors({**shapes, "embed_tokens.weight": _EMBEDDING, **added}))


safe_ai_lab = partial(published, "specforge")
speculators = partial(published, "speculators")
several_layers = partial(published, "speculators_layers")
peagle = partial(published, "speculators_peagle")
_EMBEDDING = FORMATS["speculators"]()[1]["embed_tokens.weight"]


def deep_spec(folder: Path) -> Path:
    """Five outputs, the whole vocabulary, queries and keys normed a head."""
    norms = {f"layers.0.self_attn.{name}.weight": (HEAD,) for name in ("q_norm", "k_norm")}
    return published("deepspec_eagle3", folder, norms)


def tensors(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, mx.array]:
    """A reduced head's columns are HEAD_TOKENS."""
    mx.random.seed(0)
    made = {name: 0.3 + mx.random.normal(shape) * 0.6 for name, shape in shapes.items()}
    if "d2t" in shapes:
        made["d2t"] = mx.array([token - column for column, token in enumerate(HEAD_TOKENS)], dtype=mx.int64)
        made["t2d"] = mx.array([token in HEAD_TOKENS for token in range(VOCABULARY)])
    return made


def write(folder: Path, config: dict[str, Any], weights: Mapping[str, mx.array]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(weights))
    return folder
