"""What training computes of its network is what the target's layers compute, and its files load."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from draft_worker.short_head import read_head_tokens
from draft_worker.training.language import NO_PLACE
from draft_worker.training.target import Target
from protocol.contracts.training import DEPTHS
from tests.support.models.training_work import HEAD, trainee

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


def test_hits_have_a_place_only_where_the_target_wrote(target: Target, work: Path):
    training, row = trainee(target, work)
    places = np.flatnonzero(row.wanted)

    hits = training.hits(row, places, lambda slots, logits: np.ones(len(slots), bool))

    assert hits.shape == (len(places), DEPTHS)
    last = places == 39 - 1  # behind it the row has one token more
    assert (hits[last, 1:] == NO_PLACE).all()
    assert (hits[:, 0] == 1).all()


def test_a_row_that_the_target_did_not_write_teaches_without_harm(target: Target, work: Path):
    training, row = trainee(target, work)
    row = row._replace(wanted=np.zeros_like(row.wanted))

    loss, gradients = nn.value_and_grad(training.network, training.loss)(row, np.random.default_rng(2))

    assert np.isfinite(float(loss))
    flat: Any = tree_flatten(gradients)
    assert all(bool(mx.isfinite(gradient).all()) for _, gradient in flat)


def test_what_is_written_loads_as_a_model_with_a_short_head(target: Target, work: Path, tmp_path: Path):
    trainee(target, work)[0].write(tmp_path)

    np.testing.assert_array_equal(read_head_tokens(tmp_path, target.vocabulary), range(0, 2 * HEAD, 2))
    loaded: Any = load_model(tmp_path)
    model, config = loaded
    assert config["num_hidden_layers"] == len(model.layers) == 3


def test_a_language_model_begins_with_layers_of_the_target(target: Target, work: Path):
    training, row = trainee(target, work)
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
    training, row = trainee(target, work)
    asked: list[set[int]] = []
    head = target.head
    monkeypatch.setattr(target, "head", lambda tokens: asked.append(set(tokens.tolist())) or head(tokens))

    training.loss(row, np.random.default_rng(0))

    assert asked == [{*range(0, 2 * HEAD, 2), *row.tokens.tolist()}]
