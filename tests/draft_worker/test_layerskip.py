"""LayerSkip: a target's first layers as mlx-lm computes them, and their KV adopted from the target's arenas."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from draft_worker.engine_interface import Batch
from draft_worker.engines.layerskip import FirstLayers, LayerSkipEngine, load
from protocol.contracts.model_folder import kv_fingerprint
from protocol.contracts.tokenizer_fingerprint import vocabulary_fingerprint
from protocol.errors import InputError
from protocol.inference.language_model import LanguageModel
from protocol.kv.exchange import KvExchange
from protocol.kv.segments import unlink_segment
from protocol.messages.kv import KvReference
from protocol.messages.sampling import Sampling
from protocol.worker.process import WorkerSetup
from target_worker.kv import KvCheckpoint
from tests.support.models.architectures import tiny
from tests.support.models.drafter_files import write
from tests.support.paths import DEMO_DRAFT, DEMO_TARGET

EPOCH, EXIT = 7, 2
TEXT = [(5 * number) % 900 + 7 for number in range(200)]


class Passing(nn.Module):
    """A layer that changes nothing."""

    use_sliding = False

    def __call__(self, x: mx.array, *others: Any, **named: Any) -> mx.array:
        return x


def engine(folder: Path, owner: int | None = None) -> LayerSkipEngine:
    """Of the demo target's first layers, named by `folder`."""
    model, target = str(write(folder, ({"model_type": "exit", "layers": EXIT}, {}))), str(DEMO_TARGET)
    return load(
        WorkerSetup(address="", epoch=EPOCH, incarnation=1, engine="layerskip", model=model, target=target, owner=owner)
    )


def logits(network: Any, tokens: list[int]) -> mx.array:
    return network(mx.array([tokens]), cache=make_prompt_cache(network))[0].astype(mx.float32)


def stock_target() -> Any:
    return load_model(DEMO_TARGET)[0]


def passing_behind(network: Any, layers: int) -> Any:
    """The network with all layers from `layers` on replaced by nothing."""
    every = network.layers
    for module in network.modules():
        for value in module.values():
            if isinstance(value, list) and len(value) == len(every) and value[0] is every[0]:
                value[layers:] = [Passing() for _ in value[layers:]]
    return network


@pytest.mark.parametrize(
    "name", ["llama", "qwen3", "gemma2", "gemma3_text", "phi3", "olmo2", "gpt_neox", "smollm3", "qwen2", "qwen3_moe"]
)
def test_the_first_layers_compute_what_mlx_lm_computes_with_them(name: str):
    whole, cut = (tiny(name, num_hidden_layers=4) for _ in range(2))
    FirstLayers(EXIT).divide(cut)
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]

    assert len(cut.layers) == len(make_prompt_cache(cut)) == EXIT
    expected = logits(passing_behind(whole, EXIT), tokens)
    assert np.array_equal(np.array(logits(cut, tokens)), np.array(expected))


def test_the_draft_is_the_target_s_first_layers_and_has_its_tokenizer(tmp_path: Path):
    draft = engine(tmp_path)
    stock = stock_target()
    stock.set_dtype(mx.float32)
    expected = logits(passing_behind(stock, EXIT), TEXT[:20])[-1]
    sequence = draft.open(Sampling(), draft.vocabulary)
    sequence.prefill(TEXT[:19])
    candidates = sequence.evaluate(Batch([], [TEXT[19]], [-1], 3))[0]

    assert candidates.tokens[:1] == [int(np.argmax(np.array(expected)))]
    assert (draft.architecture, draft.tokenizer) == ("llama", vocabulary_fingerprint(DEMO_TARGET))


def test_the_weights_of_deeper_layers_are_not_read():
    def peak(layers: int) -> int:
        # Models of before are reference cycles.
        gc.collect()
        before = mx.get_active_memory()
        model = LanguageModel.load(DEMO_TARGET, FirstLayers(layers))
        held = mx.get_active_memory() - before
        del model
        return held

    weights: Any = tree_flatten(stock_target().layers[0].parameters())
    layer = sum(array.nbytes for _, array in weights)
    # As float32, twice the file's bytes.
    assert peak(5) - peak(1) >= 4 * 2 * layer > 0
    assert peak(1) < peak(5) / 2


def test_a_folder_that_is_no_exit_gets_a_sentence():
    with pytest.raises(InputError, match="holds no early exit"):
        load(WorkerSetup(address="", epoch=EPOCH, incarnation=1, engine="layerskip", model=str(DEMO_DRAFT)))


# The target's KV -----------------------------------------------------------------------------------


def kv(sequence: Any) -> list[Any]:
    keys, values = sequence._rows.export(0, len(TEXT))
    return [*keys, *values]


@pytest.fixture
def written(registry: Path) -> Iterator[KvReference]:
    """The KV of TEXT, as the target saves it."""
    model = LanguageModel.load(DEMO_TARGET)
    assert model.layout is not None
    fingerprint = kv_fingerprint(DEMO_TARGET, 16)
    exchange = KvExchange(model.layout, fingerprint=fingerprint, epoch=EPOCH, owner=os.getpid())
    checkpoint, cache = KvCheckpoint(exchange), model.sequence()
    cache.prefill(TEXT)
    reference = None
    while checkpoint.due(len(TEXT)):
        reference = checkpoint.save(cache) or reference
    assert reference is not None
    assert reference.tokens == len(TEXT)
    yield reference
    checkpoint.close()
    unlink_segment(reference.name)


def test_adopted_kv_is_that_of_a_prefill(written: KvReference, tmp_path: Path):
    draft = engine(tmp_path, owner=os.getpid())
    adopting, reading = (draft.open(Sampling(), draft.vocabulary) for _ in range(2))
    reading.prefill(TEXT)

    assert adopting.adopt(written, TEXT) == ""
    assert adopting.committed == len(TEXT)
    for adopted, prefilled in zip(kv(adopting), kv(reading), strict=True):
        assert np.allclose(adopted, prefilled, rtol=1e-4, atol=1e-4)
    grown, expected = (
        each.evaluate(Batch([], [3, 4, 5], [-1, each.next_row, each.next_row], 4)) for each in (adopting, reading)
    )
    assert [each.tokens for each in grown] == [each.tokens for each in expected]


def test_the_draft_tells_the_form_of_the_kv_that_it_shares(tmp_path: Path):
    draft = engine(tmp_path, owner=os.getpid())

    assert draft.kv is not None
    assert (draft.kv.layers, draft.model_fingerprint) == (EXIT, kv_fingerprint(DEMO_TARGET, 16))
    assert engine(tmp_path).kv is None
