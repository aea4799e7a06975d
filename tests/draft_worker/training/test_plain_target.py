"""Targets that training would misread are refused before they answer anything."""

from pathlib import Path

import numpy as np
import pytest

from draft_worker.training.language import LanguageTraining
from draft_worker.training.target import Target
from protocol.errors import InputError
from tests.support.models.architectures import tiny
from tests.support.models.tiny_models import network
from tests.support.models.training_work import write_as_target


@pytest.mark.parametrize("architecture", ["granite", "gemma", "cohere"])
def test_a_target_that_computes_more_than_its_layers_is_refused(architecture: str, tmp_path: Path):
    with pytest.raises(InputError, match=f"network {architecture}, .*choose a target of the Llama"):
        Target(write_as_target(tmp_path, tiny(architecture)))


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_layers_of_plain_targets_can_be_trained(architecture: str, tmp_path: Path):
    target = Target(write_as_target(tmp_path, network(architecture, num_hidden_layers=4)))

    assert LanguageTraining(target, np.arange(8), 2).network.layers
