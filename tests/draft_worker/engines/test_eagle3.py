"""The engine eagle3 beside its target: it takes what its file lacks from the target, and refuses another target."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from draft_worker.conditioned.engine import ConditionedEngine
from draft_worker.drafters import token_ends
from draft_worker.drafters.token_ends import TokenEnds, target_ends
from draft_worker.engine_interface import Batch
from draft_worker.engines.eagle3 import load
from protocol.contracts.drafters.description import Eagle3Form
from protocol.contracts.drafters.detection import read_drafter
from protocol.contracts.engines import draft_engine
from protocol.contracts.model_folder import HEAD_TOKENS
from protocol.errors import InputError
from protocol.messages.features import FeatureForm
from protocol.messages.sampling import Sampling
from protocol.worker.process import WorkerSetup
from tests.support.models import eagle3_folders as folders
from tests.support.models.drafter_files import LAYER
from tests.support.paths import DEMO_DRAFT

WIDTH, VOCABULARY = 256, 4096
_NONE: Mapping[str, mx.array] = MappingProxyType({})


def _drafter(folder: Path, width: int = WIDTH, weights: Mapping[str, mx.array] = _NONE, **changes: Any) -> Path:
    """For the demo draft as a target, whose embedding and head it needs, unless it has further `weights`."""
    sizes = {
        "hidden_size": width,
        "vocab_size": VOCABULARY,
        "head_dim": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    shapes = {
        "fc.weight": (width, 2 * width),
        **{f"midlayer.self_attn.{name}_proj.weight": (8, 2 * width) for name in "qkv"},
        "midlayer.self_attn.o_proj.weight": (width, 8),
        "midlayer.mlp.gate_proj.weight": (24, width),
        "midlayer.mlp.up_proj.weight": (24, width),
        "midlayer.mlp.down_proj.weight": (width, 24),
        **{f"midlayer.{name}.weight": (width,) for name in ("input_layernorm", "hidden_norm")},
        "midlayer.post_attention_layernorm.weight": (width,),
        "norm.weight": (width,),
    }
    own = {name: mx.random.normal(shape, key=mx.random.key(1)) for name, shape in shapes.items()}
    outputs = {
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2]},
        "architectures": ["LlamaForCausalLMEagle3"],
    }
    return folders.write(folder, LAYER | sizes | outputs | changes, own | dict(weights))


def _setup(folder: Path, target: Path | None = DEMO_DRAFT) -> WorkerSetup:
    return WorkerSetup(address="", epoch=0, incarnation=0, engine="eagle3", model=str(folder), target=str(target or ""))


def test_embedding_and_head_are_the_target_s(tmp_path: Path):
    engine = load(_setup(_drafter(tmp_path)))

    assert draft_engine("eagle3").model == "drafter"
    assert engine.features == FeatureForm((0, 2), WIDTH)
    assert engine.vocabulary == VOCABULARY
    assert engine.tokenizer
    assert engine.open(Sampling(), VOCABULARY).staleness == 0


def test_a_head_of_its_own_spares_reading_the_target_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    read: list[bool] = []

    def spied(folder: Path, element: mx.Dtype, *, head: bool = True, **others: Any) -> TokenEnds:
        read.append(head)
        return target_ends(folder, element, head=head, **others)

    monkeypatch.setattr(token_ends, "target_ends", spied)
    own = {"lm_head.weight": mx.random.normal((VOCABULARY, WIDTH), key=mx.random.key(1))}
    for weights in ({}, own):
        load(_setup(_drafter(tmp_path, weights=weights)))

    assert read == [True, False]


def test_tokens_of_the_context_join_a_short_head_of_the_target_s(tmp_path: Path):
    prompt, head = [3, 11, 50, 2, 3], np.arange(0, VOCABULARY, 9, dtype=np.int32)
    guessable = {*head.tolist(), *prompt}
    whole, short = (_drafter(tmp_path / name, architectures=["LlamaForCausalLMEagle3"]) for name in ("whole", "short"))
    np.save(short / HEAD_TOKENS, head)

    expected = _ranking(load(_setup(whole)), prompt, VOCABULARY)
    found = _ranking(load(_setup(short)), prompt, len(guessable))

    assert found == [token for token in expected if token in guessable]
    drafter = read_drafter(short)
    assert drafter is not None
    assert isinstance(drafter.form, Eagle3Form)
    assert drafter.form.head_size == len(head)


def _ranking(engine: ConditionedEngine, prompt: list[int], count: int) -> list[int]:
    """The most probable tokens behind the prompt, the first one first."""
    sequence = engine.open(Sampling(temperature=0.0), VOCABULARY)
    sequence.prefill(prompt[:-1])
    sequence.feed(0, np.random.default_rng(2).normal(size=(len(prompt) - 1, 2 * WIDTH)).astype(np.float32))
    (found,) = sequence.evaluate(Batch((), prompt[-1:], [-1], count))
    return list(found.tokens)


def test_another_target_gets_a_sentence(tmp_path: Path):
    with pytest.raises(InputError, match="states of 128 numbers, and the target's have 256"):
        load(_setup(_drafter(tmp_path, width=128)))
    with pytest.raises(InputError, match="the target has 3 layers"):
        load(_setup(_drafter(tmp_path, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 3]})))


def test_without_a_target_a_drafter_that_needs_one_gets_a_sentence(tmp_path: Path):
    with pytest.raises(InputError, match=r"name a target|tokenizer\.json"):
        load(_setup(_drafter(tmp_path), None))
