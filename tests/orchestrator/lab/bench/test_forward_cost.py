"""Laws of the bytes that a forward reads."""

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from orchestrator.lab.bench.models import weights_read
from protocol.contracts.model_folder import HEAD_TOKENS

_VOCABULARY, _HIDDEN, _GROUP = 64, 32, 32


def _checkpoint(folder: Path, *, tied: bool, quantized: bool) -> dict[str, mx.array]:
    """An embedding, one layer and perhaps a head."""
    modules = {
        "model.embed_tokens": nn.Embedding(_VOCABULARY, _HIDDEN),
        "model.layers.0.up": nn.Linear(_HIDDEN, 96, bias=False),
    }
    if not tied:
        modules["lm_head"] = nn.Linear(_HIDDEN, _VOCABULARY, bias=False)
    if quantized:
        modules = {name: module.to_quantized(group_size=_GROUP, bits=4) for name, module in modules.items()}
    tensors = {f"{name}.{key}": value for name, module in modules.items() for key, value in module.parameters().items()}
    tensors["model.norm.weight"] = mx.ones(_HIDDEN, mx.float16)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, {"format": "mlx"})
    config = {"quantization": {"group_size": _GROUP, "bits": 4}} if quantized else {}
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


@pytest.mark.parametrize("quantized", [False, True])
def test_a_processor_reads_every_weight_as_float32_and_a_tied_embedding_whole(tmp_path: Path, quantized: bool):
    _checkpoint(tmp_path, tied=True, quantized=quantized)

    assert weights_read(tmp_path, on_processor=True) == 4 * (_VOCABULARY * _HIDDEN + 96 * _HIDDEN + _HIDDEN)


@pytest.mark.parametrize("quantized", [False, True])
def test_a_forward_reads_one_row_of_an_embedding_that_is_not_the_head(tmp_path: Path, quantized: bool):
    _checkpoint(tmp_path, tied=False, quantized=quantized)

    rows = 1 + _VOCABULARY + 96
    assert weights_read(tmp_path, on_processor=True) == 4 * (rows * _HIDDEN + _HIDDEN)


def test_a_gpu_reads_the_weights_as_they_are_stored(tmp_path: Path):
    tensors = _checkpoint(tmp_path, tied=True, quantized=True)

    assert weights_read(tmp_path, on_processor=False) == sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("tied", [False, True])
def test_a_short_head_reads_its_own_rows(tmp_path: Path, tied: bool):
    _checkpoint(tmp_path, tied=tied, quantized=True)
    whole = weights_read(tmp_path, on_processor=True)
    np.save(tmp_path / HEAD_TOKENS, np.arange(16, dtype=np.int32))

    assert weights_read(tmp_path, on_processor=True) == whole - 4 * (_VOCABULARY - 16) * _HIDDEN
