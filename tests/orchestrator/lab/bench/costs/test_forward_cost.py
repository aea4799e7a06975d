"""Laws of the cost of a forward: the line through its times, the bytes that it reads, its share of the bandwidth."""

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from orchestrator.lab.bench.costs.micro import ForwardCost, findings, least_squares, measured_forwards
from orchestrator.lab.bench.costs.micro_bandwidth import figures
from orchestrator.lab.bench.models import weights_read
from orchestrator.lab.calibration.calibrate import WIDTHS
from orchestrator.machine.hardware import partition_cores
from orchestrator.machine.models.checkpoints import demo_model
from protocol.contracts.head_tokens import HEAD_TOKENS
from tests.support.shown import shown

_VOCABULARY, _HIDDEN, _GROUP = 64, 32, 32


def test_least_squares_recovers_a_known_line():
    line = least_squares({width: 0.025 + 0.0009 * width for width in WIDTHS})

    assert (line.fixed, line.marginal) == (pytest.approx(0.025), pytest.approx(0.0009))
    assert line.deviation == pytest.approx(0.0, abs=1e-12)


def test_errors_that_balance_leave_the_line_and_give_the_deviation():
    line = least_squares({1: 0.011, 2: 0.009, 3: 0.009, 4: 0.011})

    assert (line.fixed, line.marginal) == (pytest.approx(0.01), pytest.approx(0.0, abs=1e-12))
    assert line.deviation == pytest.approx(0.001)


def test_the_share_is_the_rate_of_the_weights_over_the_rate_of_the_stream():
    cost = ForwardCost(model="target", seconds={1: 0.05, 2: 0.06}, weights=400_000_000, bandwidth=10e9)

    assert cost.bandwidth_share == pytest.approx(0.8)


def test_a_model_on_a_gpu_has_no_share_of_the_processors_stream():
    cost = ForwardCost(model="target", seconds={1: 0.05, 2: 0.06}, weights=400_000_000, bandwidth=None)

    assert cost.bandwidth_share is None
    assert cost.to_json()["bandwidth_share"] is None


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


def test_the_stream_test_has_a_copy_and_a_dot_product():
    copy, product = figures(threads=2, size=1 << 20, repeats=2)

    assert copy.unit == product.unit == "bytes/s"
    assert min(copy.value, product.value) > 1e6


@pytest.mark.thorough
def test_real_forwards_are_measured_and_shown_by_width():
    costs = measured_forwards(demo_model("target"), demo_model("draft"), samples=1)

    found = findings([], costs, [])
    lines = shown(found, width=128).splitlines()
    assert max(map(len, lines)) <= 128
    assert [line.split()[0] for line in lines[2:4]] == ["target", "draft"]
    assert [cost["model"] for cost in found.figures["forwards"]] == ["target", "draft"]
    for cost in costs:
        assert tuple(cost.seconds) == WIDTHS
        assert min(cost.seconds.values()) > 0.0
    assert costs[0].weights == weights_read(demo_model("target"), on_processor=bool(partition_cores()))
