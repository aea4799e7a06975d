"""Laws of the memory of weights: the headers tell what a loaded model takes."""

import json
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import quantize_model, save_config, save_model

from orchestrator.machine.memory.weights import loaded_drafter, loaded_weights
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


class _Group:
    """The first of two ranks, which is asked for sizes alone."""

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0


@pytest.mark.parametrize("tied", [False, True])
def test_a_rank_holds_its_share_of_the_layers_and_the_whole_embedding_and_head(tied: bool, tmp_path: Path):
    network = tiny("llama", tie_word_embeddings=tied)
    save_model(tmp_path, network)
    network = tiny("llama", tie_word_embeddings=tied)
    network.shard(_Group())
    held = sum(array.nbytes for _, array in tree_flatten(network.parameters()) if isinstance(array, mx.array))

    assert loaded_weights(tmp_path, on_processor=True, ranks=2) == pytest.approx(held, rel=0.01)


def test_files_that_mlx_lm_does_not_read_do_not_count(tmp_path: Path):
    save_model(tmp_path, tiny("llama"))
    alone, drafter = loaded_weights(tmp_path, on_processor=True), loaded_drafter(DEMO_DRAFT, tmp_path, True)
    tensors = dict(tree_flatten(tiny("llama").parameters()))
    mx.save_safetensors(
        str(tmp_path / "consolidated.safetensors"), {f"x.{name}": each for name, each in tensors.items()}
    )

    assert loaded_weights(tmp_path, on_processor=True) == alone
    assert loaded_drafter(DEMO_DRAFT, tmp_path, True) == drafter


@pytest.mark.parametrize("bits", [0, -4, 1e400])
def test_impossible_bits_are_no_error_of_the_estimate(bits: float, tmp_path: Path):
    network, config = quantize_model(tiny("llama"), configuration("llama"), group_size=32, bits=4)
    save_model(tmp_path, network)
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization": {"bits": bits, "group_size": 32}}))

    assert loaded_weights(tmp_path, on_processor=True) > 0
