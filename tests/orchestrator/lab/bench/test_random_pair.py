from pathlib import Path

import mlx.core as mx
from mlx_lm.utils import load_model
from safetensors.numpy import load_file

from orchestrator.lab.bench.servers.random_pair import random_pair


def test_mlx_lm_loads_both_and_the_draft_has_the_targets_first_layer(tmp_path: Path):
    folders = random_pair(tmp_path, 4096)
    target, draft = (load_model(folder)[0] for folder in folders)
    weights = [load_file(folder / "model.safetensors") for folder in folders]

    tokens = mx.array([[5, 6, 7]])
    assert target(tokens).shape == draft(tokens).shape == (1, 3, 4096)
    assert set(weights[1]) == {name for name in weights[0] if ".layers.1." not in name}
    assert all((weights[0][name] == value).all() for name, value in weights[1].items())
