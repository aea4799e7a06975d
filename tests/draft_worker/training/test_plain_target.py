"""Targets that training would misread are refused before they answer anything."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import cohere, gemma, granite, olmo2

from draft_worker.training.kinds import KINDS
from draft_worker.training.target import Target, require_plain
from protocol.errors import InputError
from tests.support.models.tiny_models import network
from tests.support.models.training_work import write_model, write_target

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 67,
}
_SCALES = {"attention_multiplier": 0.35, "residual_multiplier": 1.0}


def _granite(logits: float, embedding: float) -> Any:
    return granite.Model(
        granite.ModelArgs(
            model_type="granite",
            rms_norm_eps=1e-5,
            logits_scaling=logits,
            embedding_multiplier=embedding,
            max_position_embeddings=512,
            attention_bias=False,
            mlp_bias=False,
            rope_theta=10_000.0,
            **_SCALES,
            **_SIZES,
        )
    )


def _gemma() -> Any:
    return gemma.Model(gemma.ModelArgs(model_type="gemma", head_dim=8, rms_norm_eps=1e-5, **_SIZES))


def _cohere() -> Any:
    return cohere.Model(cohere.ModelArgs(model_type="cohere", **_SIZES))


def _olmo2() -> Any:
    return olmo2.Model(olmo2.ModelArgs(model_type="olmo2", rms_norm_eps=1e-5, **_SIZES))


def _target(folder: Path, model: Any) -> Target:
    return Target(write_model(folder / "target", model))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (_granite(8.0, 1.0), "changes its logits behind the head"),
        (_granite(1.0, 12.0), "changes its embedding"),
        (_gemma(), "changes its embedding"),
        (_cohere(), "final norm that is no RMSNorm"),
    ],
)
def test_a_target_with_scales_of_its_own_is_refused(model: Any, words: str, tmp_path: Path):
    with pytest.raises(InputError, match=f"{words}.*choose a target of the Llama family"):
        require_plain(_target(tmp_path, model))


def test_a_norm_whose_weight_is_stored_minus_one_is_refused(tmp_path: Path):
    target = _target(tmp_path, network())
    target.stack.norm = gemma.RMSNorm(32)

    with pytest.raises(InputError, match="no RMSNorm with its stored weight"):
        require_plain(target)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("element", [mx.float32, mx.bfloat16, mx.float16])
def test_plain_targets_are_accepted_as_they_round(architecture: str, element: mx.Dtype, tmp_path: Path):
    target = _target(tmp_path, network(architecture, num_hidden_layers=4))
    target.model.set_dtype(element)

    require_plain(target)


def test_eagle3_refuses_layers_whose_norm_it_would_copy_in_vain(tmp_path: Path):
    target = _target(tmp_path, _olmo2())
    require_plain(target)

    with pytest.raises(InputError, match=r"no input_layernorm\.weight.*choose a target of the Llama"):
        KINDS["eagle3"].outputs(target, 0)


def test_eagle3_refuses_a_target_of_few_layers_and_a_number_of_layers(target: Target, tmp_path: Path):
    with pytest.raises(InputError, match="has 3 layers, and an eagle3 drafter reads outputs of 4 or more"):
        KINDS["eagle3"].outputs(Target(write_target(tmp_path / "short", layers=3)), 0)
    with pytest.raises(InputError, match="leave --layers out"):
        KINDS["eagle3"].outputs(target, 2)
