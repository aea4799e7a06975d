"""How many bonus guesses each position of a chain gets: the geometric fan-out of SSD. Pure arithmetic."""

from collections.abc import Sequence


def geometric_fan_out(acceptance: float, exponent: float, depth: int, budget: int) -> tuple[int, ...]:
    """Guesses F_0..F_depth with sum `budget`, best under the hit model 1 - p_hit(F) = F^-r.

    F_k = F_0 a^(k/(1+r)) for k < K and F_K = F_0 a^(K/(1+r)) (1-a)^(-1/(1+r))
    (arXiv 2603.03251, "Speculative Speculative Decoding", section on the cache topology).

    `acceptance` a in [0, 1], `exponent` r > 0, `depth` K >= 1, `budget` B >= 0.
    """
    accepted = min(max(acceptance, 0.01), 0.99)
    shape = [accepted ** (k / (1 + exponent)) for k in range(depth)]
    shape.append(accepted ** (depth / (1 + exponent)) * (1 - accepted) ** (-1 / (1 + exponent)))
    return spend(shape, budget)


def spend(shape: Sequence[float], budget: int) -> tuple[int, ...]:
    """Whole numbers in proportion to `shape` that sum to exactly `budget` (largest remainders first)."""
    scale = budget / sum(shape)
    floors = [int(scale * share) for share in shape]
    remainders = sorted(range(len(shape)), key=lambda k: floors[k] - scale * shape[k])
    for k in remainders[: budget - sum(floors)]:
        floors[k] += 1
    return tuple(floors)
