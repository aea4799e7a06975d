"""Laws of the memory of weights: the headers tell what a loaded model takes."""

import json
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import quantize_model, save_config, save_model

from orchestrator.machine.memory.weights import loaded_weights
from orchestrator.machine.models.checkpoints import weight_bytes
from protocol.inference.language_model import LanguageModel
from tests.support.models.architectures import configuration, tiny
from tests.support.paths import DEMO_DRAFT, DEMO_TARGET


def _held(folder: Path) -> int:
    parameters = tree_flatten(LanguageModel.load(folder).network.parameters())
    return sum(array.nbytes for _, array in parameters if isinstance(array, mx.array))


@pytest.mark.parametrize("folder", [DEMO_TARGET, DEMO_DRAFT])
def test_on_a_processor_every_weight_is_in_float32(folder: Path):
    assert loaded_weights(folder, on_processor=True) == _held(folder)


def test_elsewhere_weights_are_as_their_files_hold_them():
    assert loaded_weights(DEMO_TARGET, on_processor=False) == pytest.approx(weight_bytes(DEMO_TARGET), abs=1 << 16)


@pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="a GPU keeps quantized weights")
def test_quantized_weights_are_unpacked_on_a_processor(tmp_path: Path):
    network, config = quantize_model(tiny("llama"), configuration("llama"), group_size=32, bits=4)
    save_model(tmp_path, network)
    save_config(config, tmp_path / "config.json")

    assert json.loads((tmp_path / "config.json").read_text())["quantization"]["bits"] == 4
    assert loaded_weights(tmp_path, on_processor=True) == _held(tmp_path)
    assert loaded_weights(tmp_path, on_processor=False) < loaded_weights(tmp_path, on_processor=True) / 3
