"""Laws of examining forwards: what is compared is found, and what is timed."""

import itertools
import json
from pathlib import Path
from typing import TypeVar

import mlx.core as mx
import numpy as np
import pytest

from orchestrator.lab.forwards import (
    Compared,
    ForwardOrder,
    ForwardTimed,
    LoopTimed,
    Parting,
    Ties,
    parting,
)
from orchestrator.lab.forwards_process import In32Bits, Rounds, compare, examine, gap, ties
from protocol.inference.language_model import LanguageModel
from protocol.inference.slots import PREFIX
from protocol.messages.base import Level
from protocol.messages.sampling import Sampling
from protocol.sampling.gumbel_noise import Noise, scores
from target_worker.float32_copy import copy_in_32_bits
from tests.support.models.tiny_models import VOCABULARY, network, tree_model
from tests.support.paths import DEMO_TARGET

Kind = TypeVar("Kind")
TOKENS = tuple(int(token) for token in np.random.default_rng(3).integers(VOCABULARY, size=40))


def reports(order: ForwardOrder, kind: type[Kind], model: LanguageModel | None = None) -> list[Kind]:
    """Of this kind, by a clock that ticks a second a look."""
    ticks = itertools.count()
    found = examine(model or tree_model(), order, lambda: float(next(ticks)))
    return [one for one in found if isinstance(one, kind)]


@pytest.mark.parametrize(
    ("level", "shapes", "timed"),
    [("tree", ("chain", "tree"), [1, 5]), ("chain", ("chain",), [1, 5]), ("plain", (), [1])],
)
def test_every_width_and_shape_of_the_models_level_is_compared_with_width_1_and_none_differs_here(
    level: Level, shapes: tuple[str, ...], timed: list[int]
):
    model = tree_model()
    model.level = level
    order = ForwardOrder(tokens=TOKENS, prompt=8, compared=(1, 2, 5, 9), timed=(1, 5), contexts=(16,))
    found = reports(order, Compared, model)

    expected = [(1, "chain"), *((width, shape) for width in (2, 5, 9) for shape in shapes)]
    assert [(one.width, one.shape) for one in found] == expected
    assert all(one.positions >= 27 and one.difference < 1e-4 for one in found)
    assert {(one.flips, one.gap) for one in found} == {(0, None)}
    assert reports(order, Ties, model) == [Ties("own", 32, 0, 0)]
    assert [one.width for one in reports(order, ForwardTimed, model)] == timed


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
    order = ForwardOrder(tokens=TOKENS, prompt=8, compared=(1, 5), heads=("own", "float32"))

    assert [one.head for one in reports(order, Ties, model)] == ["own", "float32"]
    compared = [(one.head, one.flips) for one in reports(order, Compared, model)]
    assert compared == [*[("own", 0)] * 3, *[("float32", 0)] * 3]
    assert model.sequence().evaluate((5,), (-1,)).dtype == kind


def test_ties_are_counted_in_units_of_the_logits_own_type():
    """Between 2 and 4 bfloat16 has a number every 1/64."""
    rows = np.array([[1, 3, 3], [1, 3, 3 - 1 / 64], [1, 3, 3 - 1 / 32], [-4, -3, -3]], np.float32)

    assert ties(rows, 2**-7, "own") == Ties("own", 4, 2, 3)
    assert ties(rows, 2**-23, "float32") == Ties("float32", 4, 2, 2)


def test_our_loops_await_each_result_or_dispatch_the_next_before():
    assert reports(ForwardOrder(tokens=TOKENS, prompt=8, rounds=4), LoopTimed) == [
        LoopTimed(loop, width, 250.0) for width in (1, 5) for loop in ("waited", "ahead")
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
    timed = reports(ForwardOrder(timed=(1, 3), contexts=(16, 4000, 10**6), samples=2), ForwardTimed)

    assert timed == [ForwardTimed(width, context, 1000.0) for context in (16, 4000) for width in (1, 3)]


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
    assert LanguageModel.load(DEMO_TARGET, In32Bits()).sequence().evaluate((5,), (-1,)).dtype == mx.float32


PROMPT = (5, 9, 2, 33)


@pytest.mark.parametrize(
    ("one", "other", "shared", "following"),
    [((1, 2, 3), (1, 4, 3), (1,), (2, 4)), ((1, 2), (1, 2, 3), (1, 2), (3,)), ((), (7,), (), (7,))],
)
def test_texts_part_at_their_first_difference(one: tuple, other: tuple, shared: tuple, following: tuple):
    assert parting(PROMPT, one, other, 0.7, 3) == Parting((*PROMPT, *shared), following, 0.7, 3)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.7, seed=3)])
def test_the_gap_is_that_between_what_follows_and_the_best(sampling: Sampling):
    model, noise = tree_model(), Noise(VOCABULARY)
    sequence = model.sequence()
    sequence.prefill(PROMPT[:-1])
    logits = sequence.evaluate(PROMPT[-1:], [PREFIX])
    place = np.array(scores(logits, [len(PROMPT)], sampling, noise))[0]
    first, second, *_, last = np.argsort(-place).tolist()
    scale = (sampling.temperature or 1.0) / np.array(logits.astype(mx.float32)).std()

    def measured(*following: int) -> float:
        return gap(model, Parting(PROMPT, following, sampling.temperature, sampling.seed), noise)

    assert measured(first, second) == pytest.approx((place[first] - place[second]) * scale, rel=1e-3)
    assert measured(last, first) == pytest.approx((place[first] - place[last]) * scale, rel=1e-3)
    # One text ends: at best by the second token.
    assert measured(first) == measured(first, second)
    assert measured(last) == measured(last, first)
