"""Laws of examining forwards: what is compared is found, and what is timed."""

import itertools
from typing import TypeVar

import mlx.core as mx
import numpy as np
import pytest

from orchestrator.lab.forwards import (
    Compared,
    ForwardOrder,
    ForwardsReady,
    ForwardTimed,
    LoopTimed,
    Parting,
    Ties,
    parting,
)
from orchestrator.lab.forwards_process import ELEMENTS, Rounds, Unpacked, compare, examine, gap, made_up, ties
from protocol.inference.language_model import LanguageModel
from protocol.inference.observed_modules import stage
from protocol.inference.slots import PREFIX
from protocol.messages.base import Level
from protocol.messages.sampling import Sampling
from protocol.sampling.gumbel_noise import Noise, scores
from tests.support.models.tiny_models import VOCABULARY, tree_model
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
    assert reports(order, Ties, model) == [Ties(32, 0, 0)]
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


def test_ties_are_counted_in_units_of_the_logits_own_type():
    """Between 2 and 4 bfloat16 has a number every 1/64."""
    rows = np.array([[1, 3, 3], [1, 3, 3 - 1 / 64], [1, 3, 3 - 1 / 32], [-4, -3, -3]], np.float32)

    assert ties(rows, 2**-7) == Ties(4, 2, 3)
    assert ties(rows, 2**-23) == Ties(4, 2, 2)


def test_our_loops_await_each_result_or_dispatch_the_next_before_and_are_not_staged_last():
    model = tree_model()
    model.unstage = stage(model.network)
    found = reports(ForwardOrder(tokens=TOKENS, prompt=8, rounds=4, contexts=(64,)), LoopTimed, model)

    assert [(one.loop, one.width, one.context) for one in found] == [
        (loop, *of) for loop in ("ahead", "waited", "unstaged") for of in ((1, 0), (5, 0), (1, 64))
    ]
    assert {one.milliseconds for one in found} == {250.0}
    assert all(one.memory >= 0.0 for one in found)


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

    assert timed == [ForwardTimed(width, context, 1000.0, 1000.0) for context in (16, 4000) for width in (1, 3)]


@pytest.mark.parametrize("precision", ["float32", pytest.param("bfloat16", marks=pytest.mark.half)])
def test_a_model_and_a_made_up_drafter_are_examined_in_each_type(precision: str):
    kind = ELEMENTS[precision]
    stored, drafter = LanguageModel.load(DEMO_TARGET, Unpacked(kind)), made_up(kind, 128)
    found = [one for model in (stored, drafter) for one in reports(ForwardOrder(), ForwardsReady, model)]

    assert [(one.activations, one.level) for one in found] == [(precision, "tree")] * 2
    assert all(one.size > 0 for one in found)


def test_a_mixture_of_experts_is_made_up_and_compared_in_joint_forwards_too():
    order = ForwardOrder(tokens=TOKENS[:14], prompt=8, compared=(3,), joint=True)
    found = reports(order, Compared, made_up(mx.float32, 0))

    assert [one.shape for one in found] == ["chain", "tree", "joint"]
    assert all(one.positions == 6 and one.difference < 1e-4 for one in found)


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
