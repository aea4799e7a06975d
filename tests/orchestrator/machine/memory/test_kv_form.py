"""Laws of the memory of KV and weights: what a model's files state is what it takes, and never much less."""

import json
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import quantize_model, save_config, save_model

from orchestrator.machine.memory.kv_form import (
    KvSizes,
    attention_heads,
    element_bytes,
    keeps_latents,
    kv_form,
)
from orchestrator.machine.memory.weights import loaded_drafter, loaded_weights
from orchestrator.machine.models.checkpoints import weight_bytes
from protocol.contracts.kv_bits import KvBits
from protocol.inference.language_model import LanguageModel
from protocol.inference.tree_sequence import TreeSequence
from tests.support.models import architectures
from tests.support.models.architectures import configuration, tiny
from tests.support.paths import DEMO_DRAFT, DEMO_TARGET

TOKENS = 500
EXACT = ("llama", "qwen2", "qwen3", "gemma3_text", "gpt_oss", "cohere2", "deepseek_v3", "mixtral", "llama4")
BOUNDED = (
    *("deepseek_v2", "deepseek_v32", "minicpm3", "gpt2", "longcat_flash", "qwen3_next", "lfm2", "gemma3n", "phixtral"),
    *("granitemoehybrid", "falcon_h1", "nemotron_h", "kimi_linear"),
)


def _held(name: str) -> int:
    sequence = TreeSequence(architectures.tiny(name))
    sequence.prefill([token % architectures.SIZES["vocab_size"] for token in range(TOKENS)])
    return sequence.memory


@pytest.mark.parametrize("name", EXACT)
def test_keys_and_values_take_what_the_configuration_states(name: str):
    form = kv_form(architectures.configuration(name))

    assert form is not None
    assert form.bytes(TOKENS, 4.0, windows_whole=True) == _held(name)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", BOUNDED)
def test_no_architecture_takes_more_than_is_estimated(name: str):
    form = kv_form(architectures.configuration(name))

    assert form is not None
    assert 0.95 < form.bytes(TOKENS, 4.0, windows_whole=True) / _held(name) <= 2.1


@pytest.mark.thorough
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_quantized_rows_take_their_bits_and_their_scales(bits: KvBits):
    model = LanguageModel.load(DEMO_TARGET, kv_bits=bits)
    form = kv_form({**vars(model.network.args)})
    sequence = model.sequence()
    sequence.prefill([token % 100 for token in range(TOKENS)])

    assert form is not None
    assert form.bytes(TOKENS, element_bytes(bits, on_processor=True)) == pytest.approx(sequence.memory, rel=0.08)


def test_a_window_bounds_its_layers_once_their_rows_are_saved():
    form = KvSizes(full=10, windowed=30, window=1024)

    assert form.bytes(8192, 2.0) == 2 * (10 * 8192 + 30 * (1024 + 2048))
    assert form.bytes(8192, 2.0, windows_whole=True) == 2 * 40 * 8192
    assert form.bytes(512, 2.0) == 2 * 40 * 512


@pytest.mark.parametrize("name", ["qwen3_next", "granitemoehybrid", "falcon_h1", "nemotron_h"])
def test_recurrent_layers_take_the_same_at_every_length(name: str):
    sequence = TreeSequence(architectures.tiny(name))
    for _ in range(6):
        sequence.prefill(list(range(40)))
    form = kv_form(architectures.configuration(name))

    assert form is not None
    assert form.bytes(0, 4.0) == form.state
    assert form.bytes(sequence.committed, 4.0) >= sequence.memory


def test_the_text_model_s_part_of_a_configuration_counts():
    text = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 1}

    assert kv_form({"model_type": "vision", "text_config": text}) == kv_form(text) == KvSizes(full=2 * 2 * 16)
    assert attention_heads({"text_config": text}) == 4


@pytest.mark.parametrize(("name", "latent"), [("deepseek_v3", True), ("deepseek_v2", False), ("llama", False)])
def test_latent_keys_have_no_heads_to_divide(name: str, latent: bool):
    assert keeps_latents(architectures.configuration(name)) == latent


def test_a_configuration_without_sizes_gives_no_form():
    assert kv_form({"num_hidden_layers": 10**400, "hidden_size": 64, "num_attention_heads": 4}) is None
    assert kv_form({"model_type": "own"}) is None
    assert kv_form({"num_hidden_layers": "2", "hidden_size": 64, "num_attention_heads": 4}) is None


# Weights -----------------------------------------------------------------------------------------


def _loaded(folder: Path) -> int:
    parameters = tree_flatten(LanguageModel.load(folder).network.parameters())
    return sum(array.nbytes for _, array in parameters if isinstance(array, mx.array))


@pytest.mark.parametrize("folder", [DEMO_TARGET, DEMO_DRAFT])
def test_on_a_processor_every_weight_is_in_float32(folder: Path):
    assert loaded_weights(folder, on_processor=True) == _loaded(folder)


def test_elsewhere_weights_are_as_their_files_hold_them():
    assert loaded_weights(DEMO_TARGET, on_processor=False) == pytest.approx(weight_bytes(DEMO_TARGET), abs=1 << 16)


@pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="a GPU keeps quantized weights")
def test_quantized_weights_are_unpacked_on_a_processor(tmp_path: Path):
    network, config = quantize_model(tiny("llama"), configuration("llama"), group_size=32, bits=4)
    save_model(tmp_path, network)
    save_config(config, tmp_path / "config.json")

    assert json.loads((tmp_path / "config.json").read_text())["quantization"]["bits"] == 4
    assert loaded_weights(tmp_path, on_processor=True) == _loaded(tmp_path)
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
