"""Laws of staged dispatch: the same bits, whatever the layers are, and work before the graph is built."""

import random
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from protocol.inference.joint_forward import ForwardPart
from protocol.inference.language_model import LanguageModel
from protocol.inference.observed_modules import observe, stage
from protocol.inference.slots import PREFIX
from tests.support.models.architectures import tiny
from tests.support.models.tiny_models import VOCABULARY, network

_FAMILIES = ("llama", "qwen3", "gemma3_text", "qwen3_5", "mamba2", "lfm2", "deepseek_v3", "gpt_oss")
"""Full attention, windows, recurrences beside attention and alone, latent attention, short convolutions. Mixtures of
experts, behind the first five, compute in float32 alone on a processor."""
_ROUNDS = 6


def _logits(model: LanguageModel, seed: int) -> list[mx.array]:
    """Of a prompt and of rounds of one token, of trees and of two sequences together, some tokens of which are kept."""
    chance = random.Random(seed)
    found: list[mx.array] = []
    one, other = model.sequence(), model.sequence()
    for sequence in (one, other):
        prompt = sequence.prefill(chance.choices(range(VOCABULARY), k=11))
        assert prompt is not None
        found.append(prompt)
    for round in range(_ROUNDS):
        width = 1 if model.level != "tree" or round % 3 == 0 else 5
        parents = [[PREFIX, *(each.next_row + below for below in (0, 0, 1, 2))][:width] for each in (one, other)]
        tokens = [chance.choices(range(VOCABULARY), k=width) for _ in parents]
        parts = [ForwardPart(*each) for each in zip((one, other), tokens, parents, strict=True)]
        found += model.evaluate_together(parts) if round % 2 else [part.evaluate() for part in parts]
        for each, before in zip((one, other), parents, strict=True):
            first = each.next_row - len(before)
            each.keep([first, first + 1] if width > 1 else [first], ())
    return found


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    ("family", "kind"),
    [*((family, mx.float32) for family in _FAMILIES), *((family, mx.bfloat16) for family in _FAMILIES[:5])],
)
def test_every_kind_of_layer_gives_the_same_bits(family: str, kind: mx.Dtype):
    made: list[Any] = [tiny(family) for _ in range(2)]
    for each in made:
        each.set_dtype(kind)
    plain, staged = (LanguageModel(each) for each in made)
    stage(staged.network)

    for expected, logits in zip(_logits(plain, 1), _logits(staged, 1), strict=True):
        assert np.array_equal(np.array(expected.astype(mx.float32)), np.array(logits.astype(mx.float32)))


def test_recorded_states_are_the_same():
    plain, staged = LanguageModel(network()), LanguageModel(network())
    stage(staged.network)
    for model in (plain, staged):
        model.record((-1, 0, 1))
    found = []
    for model in (plain, staged):
        sequence = model.sequence()
        sequence.prefill((5, 9, 2))
        sequence.evaluate([7, 3, 4], [PREFIX, 0, 0])
        assert sequence.recorded is not None
        found.append(np.array(sequence.recorded.rows))
        model.record(())
    sequence = staged.sequence()
    sequence.prefill((5, 9, 2))

    assert np.array_equal(*found)
    assert sequence.recorded is None


def test_the_first_layers_are_dispatched_before_the_last_ones_are_built(monkeypatch: pytest.MonkeyPatch):
    order: list[str] = []
    model = LanguageModel(network(num_hidden_layers=36))
    stage(model.network)
    dispatch = mx.async_eval
    monkeypatch.setattr(mx, "async_eval", lambda *arrays: order.append("work") or dispatch(*arrays))
    for place, layer in enumerate(model.network.layers):
        observe(layer.self_attn, lambda _, __, result, place=place: order.append(str(place)) or result)
    sequence = model.sequence()
    sequence.evaluate([5], [PREFIX])

    assert [order[index - 1] for index, each in enumerate(order) if each == "work"] == ["0", "2", "6", "18"]


def test_a_network_without_layers_stays_as_it_is():
    stage(object())
