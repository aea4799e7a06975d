"""Targets that training would misread are refused before they answer anything."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import gemma

from draft_worker.training.target import Target, require_plain
from protocol.errors import InputError
from tests.support.models.architectures import tiny
from tests.support.models.tiny_models import network
from tests.support.models.training_work import write_as_target


def _target(folder: Path, model: Any) -> Target:
    return Target(write_as_target(folder / "target", model))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (tiny("granite", logits_scaling=8.0), "changes its logits behind the head"),
        (tiny("granite", embedding_multiplier=12.0), "changes its embedding"),
        (tiny("gemma"), "changes its embedding"),
        (tiny("cohere"), "final norm that is no RMSNorm"),
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
