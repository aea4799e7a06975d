"""Laws of the memory of KV: what a model's configuration states is what it takes, and never much less."""

from typing import Any

import pytest

from orchestrator.machine.memory.kv_form import (
    KvSizes,
    attention_heads,
    element_bytes,
    keeps_latents,
    kv_form,
)
from protocol.contracts.model_folder import KvBits
from protocol.inference.language_model import LanguageModel
from protocol.inference.tree_sequence import TreeSequence
from tests.support.models import architectures
from tests.support.paths import DEMO_TARGET

TOKENS = 500
EXACT = ("llama", "qwen2", "qwen3", "gemma3_text", "gpt_oss", "cohere2", "deepseek_v3", "mixtral", "llama4")
BOUNDED = (
    *("deepseek_v2", "deepseek_v32", "minicpm3", "gpt2", "longcat_flash", "qwen3_next", "lfm2", "gemma3n", "phixtral"),
    *("granitemoehybrid", "falcon_h1", "nemotron_h", "kimi_linear"),
)


def stated(config: dict[str, Any]) -> KvSizes:
    form = kv_form(config)
    assert form is not None
    return form


def _held(name: str) -> int:
    sequence = TreeSequence(architectures.tiny(name))
    sequence.prefill([token % architectures.SIZES["vocab_size"] for token in range(TOKENS)])
    return sequence.memory


@pytest.mark.parametrize("name", EXACT)
def test_keys_and_values_take_what_the_configuration_states(name: str):
    form = stated(architectures.configuration(name))

    assert form.bytes(TOKENS, 4.0, windows_whole=True) == _held(name)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", BOUNDED)
def test_no_architecture_takes_more_than_is_estimated(name: str):
    form = stated(architectures.configuration(name))

    assert 0.95 < form.bytes(TOKENS, 4.0, windows_whole=True) / _held(name) <= 2.1


@pytest.mark.thorough
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_quantized_rows_take_their_bits_and_their_scales(bits: KvBits):
    model = LanguageModel.load(DEMO_TARGET, kv_bits=bits)
    form = stated({**vars(model.network.args)})
    sequence = model.sequence()
    sequence.prefill([token % 100 for token in range(TOKENS)])

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
    form = stated(architectures.configuration(name))

    assert form.bytes(0, 4.0, states=6) == 6 * form.state
    assert form.bytes(sequence.committed, 4.0, states=6) >= sequence.memory


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
