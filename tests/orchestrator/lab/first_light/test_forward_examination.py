"""Laws of comparing forwards: on a processor no width changes a logit, and a change is found where it is."""

import itertools
import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from orchestrator.lab.first_light.forward_examination import In32Bits, Rounds, compare, examine, ties
from orchestrator.lab.first_light.forwards import (
    Compared,
    ForwardOrder,
    ForwardsReady,
    ForwardTimed,
    LoopTimed,
    Ties,
)
from protocol.inference.language_model import LanguageModel
from protocol.messages.base import Level
from target_worker.float32_copy import copy_in_32_bits
from tests.support.models.tiny_models import VOCABULARY, network, tree_model
from tests.support.paths import DEMO_TARGET

TOKENS = tuple(int(token) for token in np.random.default_rng(3).integers(VOCABULARY, size=40))


def test_every_width_and_shape_is_compared_with_width_1_and_none_differs_here():
    order = ForwardOrder(folder="", tokens=TOKENS, prompt=8, compared=(1, 2, 5, 9))
    loaded, counted, *compared = examine(tree_model(), order, lambda: 0.0)

    assert isinstance(loaded, ForwardsReady)
    assert counted == Ties("own", 32, 0, 0)
    assert [(one.width, one.shape) for one in compared if isinstance(one, Compared)] == [
        *((1, "chain"), (2, "chain"), (2, "tree"), (5, "chain"), (5, "tree"), (9, "chain"), (9, "tree"))
    ]
    for one in compared:
        assert isinstance(one, Compared)
        assert one.positions >= 27
        assert (one.flips, one.gap) == (0, None)
        assert one.difference < 1e-4


@pytest.mark.parametrize(
    ("level", "forwards", "timed"),
    [("chain", [(1, "chain"), (2, "chain"), (5, "chain")], [1, 5]), ("plain", [(1, "chain")], [1])],
)
def test_only_forwards_of_the_models_level_are_examined(
    level: Level, forwards: list[tuple[int, str]], timed: list[int]
):
    model = tree_model()
    model.level = level
    order = ForwardOrder(folder="", tokens=TOKENS, prompt=8, compared=(1, 2, 5), timed=(1, 5), contexts=(16,))
    reports = list(examine(model, order, lambda: 0.0))

    assert [(one.width, one.shape) for one in reports if isinstance(one, Compared)] == forwards
    assert [one.width for one in reports if isinstance(one, ForwardTimed)] == timed


def test_a_flip_is_counted_with_the_gap_that_it_had():
    expected = np.zeros((3, 4), np.float32)
    expected[:, 0], expected[:, 1] = 1.0, 0.9
    got = expected.copy()
    got[1, 1] = 1.1
    found = compare(expected, got, 5, "chain")

    assert (found.width, found.positions, found.flips) == (5, 3, 1)
    spread = expected[0].std()
    assert found.difference == pytest.approx(0.2 / spread, rel=1e-4)
    assert found.gap == pytest.approx(0.1 / spread, rel=1e-4)


@pytest.mark.parametrize("kind", [mx.float16, mx.bfloat16])
def test_in_half_precision_a_head_in_32_bits_is_compared_too_and_left_as_it_was(kind: mx.Dtype):
    stock = network()
    stock.set_dtype(kind)
    model = LanguageModel(stock)
    order = ForwardOrder(folder="", tokens=TOKENS, prompt=8, compared=(1, 5), heads=("own", "float32"))
    reports = list(examine(model, order, lambda: 0.0))

    assert [one.head for one in reports if isinstance(one, Ties)] == ["own", "float32"]
    assert [one.head for one in reports if isinstance(one, Compared)] == [*["own"] * 3, *["float32"] * 3]
    assert all(one.flips == 0 for one in reports if isinstance(one, Compared))
    assert model.sequence().evaluate((5,), (-1,)).dtype == kind


def test_ties_are_counted_in_units_of_the_logits_own_type():
    """Between 2 and 4 bfloat16 has a number every 1/64."""
    rows = np.array([[1, 3, 3], [1, 3, 3 - 1 / 64], [1, 3, 3 - 1 / 32], [-4, -3, -3]], np.float32)

    assert ties(rows, 2**-7, "own") == Ties("own", 4, 2, 3)
    assert ties(rows, 2**-23, "float32") == Ties("float32", 4, 2, 2)


def test_loops_are_timed_as_mlx_lm_runs_and_ours_await_each_result_or_dispatch_the_next_before():
    ticks = itertools.count()
    order = ForwardOrder(folder="", tokens=TOKENS, prompt=8, rounds=4)
    timed = [one for one in examine(tree_model(), order, lambda: float(next(ticks))) if isinstance(one, LoopTimed)]

    assert timed == [
        LoopTimed("mlx-lm", 1, 250.0),
        *(LoopTimed(loop, width, 250.0) for width in (1, 5) for loop in ("waited", "ahead")),
    ]


@pytest.mark.parametrize("parents", [(-1,), (-1, 0, 0, 1, 1)])
def test_forwards_that_are_dispatched_ahead_leave_the_sequence_as_those_that_are_awaited(parents: tuple[int, ...]):
    model, left = tree_model(), []
    for ahead in (False, True):
        sequence = model.sequence()
        mx.eval(sequence.prefill(TOKENS[:8]))
        rounds = Rounds(sequence, parents, ahead)
        for _ in range(5):
            rounds.advance()
        left.append(np.array(sequence.evaluate([9], [-1])))

    assert np.array_equal(*left)


def test_a_forward_is_timed_behind_each_context_that_fits():
    model = tree_model()
    ticks = itertools.count()
    order = ForwardOrder(folder="", timed=(1, 3), contexts=(16, 4000, 10**6), samples=2)
    timed = [one for one in examine(model, order, lambda: float(next(ticks))) if isinstance(one, ForwardTimed)]

    assert [(one.width, one.context, one.milliseconds) for one in timed] == [
        *((1, 16, 1000.0), (3, 16, 1000.0), (1, 4000, 1000.0), (3, 4000, 1000.0))
    ]


def test_a_copy_in_32_bits_is_an_ordinary_model_with_the_same_tokenizer(tmp_path: Path):
    copy_in_32_bits(DEMO_TARGET, tmp_path / "copy")
    weights = mx.load(str(tmp_path / "copy" / "model.safetensors"))
    config = json.loads((tmp_path / "copy" / "config.json").read_text())

    assert isinstance(weights, dict)
    assert {weight.dtype for weight in weights.values()} == {mx.float32}
    assert "quantization" not in config
    assert (tmp_path / "copy" / "tokenizer.json").read_bytes() == (DEMO_TARGET / "tokenizer.json").read_bytes()
    copied, stored = (
        LanguageModel.load(folder).sequence().evaluate((5,), (-1,)) for folder in (tmp_path / "copy", DEMO_TARGET)
    )
    assert mx.allclose(copied, stored, atol=1e-4).item()


def test_a_model_can_be_loaded_in_32_bits():
    logits = LanguageModel.load(DEMO_TARGET, In32Bits()).sequence().evaluate((5,), (-1,))

    assert logits.dtype == mx.float32
