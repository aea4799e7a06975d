"""A target that training computes as its model does, or a refusal."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import gemma, granite, qwen3

from draft_worker.training.kind import Setting
from draft_worker.training.kinds import KINDS, eagle3
from draft_worker.training.kinds.block import BlockTraining
from draft_worker.training.target import Target
from protocol.errors import InputError
from tests.support.models.tiny_models import VOCABULARY

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 5,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def _saved(folder: Path, model: Any, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    mx.random.seed(3)
    flat: Any = tree_flatten(model.parameters())
    weights = {name: 0.3 * mx.random.normal(array.shape) for name, array in flat}
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(asdict(model.args) | changes))
    return folder


def _granite(folder: Path) -> Path:
    args = granite.ModelArgs(
        model_type="granite",
        logits_scaling=8.0,
        attention_multiplier=0.3,
        embedding_multiplier=1.0,
        residual_multiplier=1.0,
        attention_bias=False,
        mlp_bias=False,
        rope_theta=10_000.0,
        tie_word_embeddings=False,
        **_SIZES,
    )
    return _saved(folder, granite.Model(args))


def _gemma(folder: Path) -> Path:
    sizes = {name: size for name, size in _SIZES.items() if name != "max_position_embeddings"}
    return _saved(folder, gemma.Model(gemma.ModelArgs(model_type="gemma", head_dim=8, **sizes)))


def _qwen3(folder: Path, **changes: Any) -> Path:
    args = qwen3.ModelArgs(model_type="qwen3", head_dim=8, rope_theta=10_000.0, tie_word_embeddings=False, **_SIZES)
    return _saved(folder, qwen3.Model(args), **changes)


@pytest.mark.parametrize(("make", "part"), [(_granite, "head"), (_gemma, "embedding")])
def test_a_target_whose_ends_are_computed_in_another_way_is_refused(make: Any, part: str, tmp_path: Path):
    with pytest.raises(InputError, match=f"The {part} of .* in another way than Llama's"):
        Target(make(tmp_path / "target"))


def test_the_rope_is_the_one_that_the_model_computes_with(tmp_path: Path):
    stated = {"rope_theta": 1_000_000.0, "rope_type": "linear", "factor": 2.0}
    target = Target(_qwen3(tmp_path / "target", rope_theta=None, rope_parameters=stated))

    assert target.rope == (1_000_000.0, stated)
    form = eagle3.form(target, 30)
    assert (form.rope_theta, form.rope_scaling) == target.rope
    training = KINDS["dspark"].training(Setting(target, np.arange(30), (*range(5), -1), 3, 0))
    assert isinstance(training, BlockTraining)
    assert training.network.form.rope_base == 1_000_000.0


def test_a_target_of_few_layers_has_no_outputs_for_eagle3():
    with pytest.raises(InputError, match="choose --kind lm"):
        eagle3.outputs(3)
    assert eagle3.outputs(4) == (0, 1)
