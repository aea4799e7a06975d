"""Sets of moments: against counting every moment one by one, and at their edges."""

import random
from itertools import pairwise

import pytest

from orchestrator.lab.profile.analysis.overlap import Interval, Intervals, difference, intersection, total, union

DAY = 40


def some(chance: random.Random) -> list[Interval]:
    """Intervals of any kind: overlapping, nested, touching, empty, backwards."""
    return [(chance.randrange(DAY), chance.randrange(DAY)) for _ in range(chance.randrange(6))]


def moments(intervals: list[Interval]) -> set[int]:
    return {moment for begin, end in intervals for moment in range(begin, end)}


def proper(intervals: Intervals) -> bool:
    edges = [edge for interval in intervals for edge in interval]
    return all(one < other for one, other in pairwise(edges))


@pytest.mark.parametrize("seed", range(60))
def test_the_algebra_is_that_of_sets_of_moments(seed: int):
    chance = random.Random(seed)
    raw, others = some(chance), some(chance)
    one, other = union(raw), union(others)

    assert moments(one) == moments(raw)
    assert moments(intersection(one, other)) == moments(one) & moments(other)
    assert moments(difference(one, other)) == moments(one) - moments(other)
    assert total(one) == len(moments(one))
    assert all(map(proper, (one, intersection(one, other), difference(one, other))))


@pytest.mark.parametrize(
    ("raw", "joined"),
    [
        ([], []),
        ([(3, 3)], []),
        ([(5, 2)], []),
        ([(0, 2), (2, 4)], [(0, 4)]),
        ([(0, 9), (2, 4)], [(0, 9)]),
        ([(6, 8), (0, 2)], [(0, 2), (6, 8)]),
    ],
    ids=["none", "empty", "backwards", "touching", "nested", "out of order"],
)
def test_a_union_has_gaps_and_nothing_else(raw: list[Interval], joined: Intervals):
    assert union(raw) == joined


def test_nothing_is_left_of_a_set_without_itself():
    whole = [(0, 3), (5, 9)]

    assert difference(whole, whole) == []
    assert difference([], whole) == []
    assert difference(whole, []) == whole
