"""Sets of moments as disjoint intervals. Pure integer arithmetic; the unit is the caller's."""

from collections.abc import Iterable
from typing import TypeAlias

Interval: TypeAlias = tuple[int, int]
"""Begin and end, the end excluded."""
Intervals: TypeAlias = list[Interval]
"""Not empty, ascending, with gaps between them."""


def union(intervals: Iterable[Interval]) -> Intervals:
    """All moments that are in any of them. Takes what overlaps, touches, is nested, empty or out of order."""
    joined: Intervals = []
    for begin, end in sorted(intervals):
        if begin >= end:
            continue
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def intersection(one: Intervals, other: Intervals) -> Intervals:
    """Moments in both."""
    common: Intervals = []
    first = second = 0
    while first < len(one) and second < len(other):
        begin = max(one[first][0], other[second][0])
        end = min(one[first][1], other[second][1])
        if begin < end:
            common.append((begin, end))
        if one[first][1] < other[second][1]:
            first += 1
        else:
            second += 1
    return common


def difference(one: Intervals, other: Intervals) -> Intervals:
    """Moments in the first that are not in the second."""
    if not one:
        return []
    edges = [one[0][0], *(edge for interval in other for edge in interval), one[-1][1]]
    return intersection(one, [(begin, end) for begin, end in zip(edges[::2], edges[1::2], strict=True) if begin < end])


def total(intervals: Intervals) -> int:
    """How long all of them are together."""
    return sum(end - begin for begin, end in intervals)
