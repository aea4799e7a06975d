"""What training computes of a network is what its engine computes of it, and its files load."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from draft_worker.drafters.eagle3 import Eagle3, read_eagle3
from draft_worker.short_head import read_head_tokens
from draft_worker.training.chains import NO_PLACE
from draft_worker.training.kinds import KINDS
from draft_worker.training.rows import Shards
from draft_worker.training.target import Target
from protocol.contracts.training import DEPTHS, STALENESS, TRAINED_KINDS, TrainedKind
from tests.support.models.tiny_models import network
from tests.support.models.training_work import HEAD, LAYERS, trainee, write_as_target, write_work

PLACES = np.array([26, 30])
"""In the second text of a row, which begins at slot 20."""
_BEGIN = 20


class Recorder:
    """A judge that keeps the logits of each call."""

    def __init__(self) -> None:
        self.calls: list[np.ndarray] = []
        self.slots: list[np.ndarray] = []

    def __call__(self, slots: np.ndarray, logits: mx.array) -> np.ndarray:
        self.slots.append(slots)
        self.calls.append(np.array(logits))
        return np.zeros(len(slots), bool)

    def at(self, call: int, slot: int) -> np.ndarray:
        return self.calls[call][self.slots[call].tolist().index(slot)]


def test_eagle3_unrolls_as_its_engine_does_without_features(target: Target, work: Path):
    training, row = trainee("eagle3", target, work)
    network = training.network
    assert isinstance(network, Eagle3)
    network.borrow(target.embed, lambda states: states @ target.head(mx.arange(0, 2 * HEAD, 2)).T)
    features = row.states[:, [Shards(work).outputs.index(output) for output in network.form.outputs]]
    recorder = Recorder()

    training.hits(row, PLACES, recorder)

    for place in PLACES:
        fused = network.fuse(mx.array(features[_BEGIN:place].reshape(1, place - _BEGIN, -1)))
        cache = network.make_cache()[0]
        state = network(mx.array(row.tokens[None, _BEGIN + 1 : place + 1]), fused, "causal", cache)[:, -1:]
        for step in range(3):
            expected = np.array(network.logits(state)[0, 0])
            np.testing.assert_allclose(recorder.at(step, place + step), expected, rtol=1e-3, atol=1e-3)
            state = network(mx.array(row.tokens[None, place + step + 1, None]), state, "causal", cache)


def test_positions_are_read_where_newer_files_state_them(tmp_path: Path):
    folder = write_as_target(tmp_path / "target", network("qwen3", num_hidden_layers=LAYERS))
    stated = {"rope_theta": 5_000_000.0, "rope_type": "linear", "factor": 4.0}
    config = json.loads((folder / "config.json").read_text()) | {"rope_parameters": stated}
    del config["rope_theta"]
    (folder / "config.json").write_text(json.dumps(config))
    target = Target(folder)
    work = write_work(tmp_path / "work", target, rows=2)

    trainee("eagle3", target, work)[0].write(tmp_path)

    written = json.loads((tmp_path / "config.json").read_text())
    assert written["rope_theta"] == 5_000_000.0
    assert written["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize("kind", TRAINED_KINDS)
def test_hits_have_a_place_only_where_the_target_wrote(kind: TrainedKind, target: Target, work: Path):
    training, row = trainee(kind, target, work)
    places = np.flatnonzero(row.wanted)

    hits = training.hits(row, places, lambda slots, logits: np.ones(len(slots), bool))

    assert hits.shape == (len(places), STALENESS, DEPTHS)
    last = places == 39 - 1  # behind it the row has one token more
    assert (hits[last, :, 1:] == NO_PLACE).all()
    assert (hits[:, 0, 0] == 1).mean() >= 0.5


@pytest.mark.parametrize("kind", TRAINED_KINDS)
def test_a_row_that_the_target_did_not_write_teaches_without_harm(kind: TrainedKind, target: Target, work: Path):
    training, row = trainee(kind, target, work)
    row = row._replace(wanted=np.zeros_like(row.wanted))

    loss, gradients = nn.value_and_grad(training.network, training.loss)(row, np.random.default_rng(2))

    assert np.isfinite(float(loss))
    flat: Any = tree_flatten(gradients)
    assert all(bool(mx.isfinite(gradient).all()) for _, gradient in flat)


def test_published_files_load_in_their_readers(target: Target, work: Path, tmp_path: Path):
    for kind in KINDS:
        trainee(kind, target, work)[0].write(tmp_path / kind)

    assert read_eagle3(tmp_path / "eagle3").form.outputs == (1, 2)
    np.testing.assert_array_equal(read_head_tokens(tmp_path / "lm", target.vocabulary), range(0, 2 * HEAD, 2))
    loaded: Any = load_model(tmp_path / "lm")
    model, config = loaded
    assert config["num_hidden_layers"] == len(model.layers) == 3


def test_a_language_model_begins_with_layers_of_the_target(target: Target, work: Path):
    training, row = trainee("lm", target, work)
    recorder = Recorder()

    training.hits(row, PLACES, recorder)

    states = target.stack.embed_tokens(mx.array(row.tokens[None, _BEGIN : 30 + 1]))
    for layer in (*target.stack.layers[:2], target.stack.layers[-1]):
        states = layer(states, "causal", None)
    expected = target.stack.norm(states)[0, -1] @ target.head(mx.arange(0, 2 * HEAD, 2)).T
    np.testing.assert_allclose(recorder.at(0, 30), np.array(expected), rtol=2e-2, atol=2e-2)


def test_a_language_model_whose_head_is_its_embedding_also_learns_the_tokens_of_its_context(
    target: Target, work: Path, monkeypatch: pytest.MonkeyPatch
):
    training, row = trainee("lm", target, work)
    asked: list[set[int]] = []
    head = target.head
    monkeypatch.setattr(target, "head", lambda tokens: asked.append(set(tokens.tolist())) or head(tokens))

    training.loss(row, np.random.default_rng(0))

    assert asked == [{*range(0, 2 * HEAD, 2), *row.tokens.tolist()}]
