"""Computes embeddings with mlx-embeddings: `ENVIRONMENT/bin/python -I program.py FOLDER`, one JSON object a line.

The first line out is {"ready": true}; then each line in, {"rows": [[token, ...], ...]}, has a line out: {"vectors":
"..."}, base64 of a float32 for each row and dimension, little-endian, or {"error": "..."}. It ends with its input. It
runs in an environment of its own and imports nothing of ours.
"""

import base64
import json
import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_embeddings.utils import load_model  # pyright: ignore[reportMissingImports]

_TOKENS_AT_ONCE = 8192
_POOLING = "1_Pooling/config.json"
"""Of sentence-transformers; the library pools each architecture in one way only."""


def main() -> None:
    # Output of libraries must not mix with the results.
    results = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    folder = Path(sys.argv[1])
    model = load_model(folder)
    if mx.default_device() == mx.cpu:
        # A CPU has fast kernels for float32 alone.
        model.set_dtype(mx.float32)
    pooling = _pooling(folder)
    _tell(results, {"ready": True})
    for line in sys.stdin:
        try:
            vectors = _vectors(model, pooling, json.loads(line)["rows"])
            _tell(results, {"vectors": base64.b64encode(vectors.astype("<f4").tobytes()).decode()})
        except (RuntimeError, ValueError, TypeError) as error:
            _tell(results, {"error": str(error)})


def _vectors(model: Any, pooling: str | None, rows: list[list[int]]) -> np.ndarray:
    """(rows, dimensions) of length 1. Rows of one length are computed together, so that none is padded."""
    places: dict[int, list[int]] = defaultdict(list)
    for place, row in enumerate(rows):
        places[len(row)].append(place)
    found: dict[int, np.ndarray] = {}
    for length, same in places.items():
        step = max(1, _TOKENS_AT_ONCE // length)
        for first in range(0, len(same), step):
            some = same[first : first + step]
            tokens = mx.array([rows[place] for place in some])
            output = model(tokens, attention_mask=mx.ones_like(tokens))
            vectors = np.array(_pooled(output, pooling).astype(mx.float32))
            found |= dict(zip(some, vectors, strict=True))
    return np.stack([found[place] for place in range(len(rows))])


def _pooled(output: Any, pooling: str | None) -> mx.array:
    hidden = output.last_hidden_state
    if pooling is None or hidden is None:
        return output.text_embeds
    pooled = {"cls": hidden[:, 0], "mean": hidden.mean(axis=1), "last": hidden[:, -1]}[pooling]
    return pooled / mx.maximum(mx.linalg.norm(pooled, axis=-1, keepdims=True), 1e-9)


def _pooling(folder: Path) -> str | None:
    """How the model's own files say that its output becomes one vector; None where the library knows."""
    if not (folder / _POOLING).is_file() or (folder / "2_Dense").is_dir():
        return None
    settings = json.loads((folder / _POOLING).read_text())
    modes = {"cls": "pooling_mode_cls_token", "mean": "pooling_mode_mean_tokens", "last": "pooling_mode_lasttoken"}
    return next((name for name, key in modes.items() if settings.get(key)), None)


def _tell(results: Any, message: dict[str, Any]) -> None:
    results.write(json.dumps(message) + "\n")
    results.flush()


if __name__ == "__main__":
    main()
