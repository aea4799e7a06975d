"""How far two token sequences agree. Pure."""

from collections.abc import Sequence


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the longest common prefix of two token sequences."""
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return min(len(one), len(other))
