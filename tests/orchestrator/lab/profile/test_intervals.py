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
