"""Laws of the estimate of plain decoding: what a request's own forwards say about one token without a draft."""

import random

import pytest

from orchestrator.core.request_stats import ForwardSums, plain_tokens_per_second


def cost(width: int) -> float:
    """In other conditions than the forwards below: only ratios count."""
    return 1.0 + 0.1 * (width - 1)


def forwards(
    token: float, slowdown: float, shares: tuple[float, ...], widths: tuple[int, ...]
) -> dict[int, ForwardSums]:
    """Forwards that take exactly `token` seconds for one token while the draft rests."""
    sums: dict[int, ForwardSums] = {}
    for width in widths:
        for share in shares:
            seconds = token * cost(width) / cost(1) * (1 + slowdown * share)
            sums.setdefault(width, ForwardSums()).add(seconds, share)
    return sums


@pytest.mark.parametrize(
    ("slowdown", "shares", "widths", "measured"),
    [
        (0.0, (0.0,) * 8, (1,), 0.0),
        (0.0, (0.0,) * 8, (1, 4, 9), 0.0),
        (0.6, (0.0, 0.5, 1.0) * 20, (1, 4), 0.0),
        (0.6, (1.0,) * 20, (1, 4), 0.6),
    ],
    ids=["one token", "wider forwards", "beside a draft", "slowed down as was measured before"],
)
def test_plain_decoding_is_what_one_token_takes_without_a_draft(slowdown, shares, widths, measured):
    sums = forwards(0.05, slowdown, shares, widths)

    assert plain_tokens_per_second(sums, cost, measured, overhead=0.01) == pytest.approx(1 / 0.06, rel=0.02)
    # Before the first forward the measured cost of one token stands for it.
    assert plain_tokens_per_second({}, lambda _: 0.06, 0.5, overhead=0.01) == pytest.approx(1 / 0.05)


def test_forwards_that_were_faster_beside_the_draft_are_no_slowdown():
    generator = random.Random(3)
    sums = {1: ForwardSums()}
    for _ in range(20):
        sums[1].add(0.05 * generator.uniform(0.99, 1.01), share=0.0)
        sums[1].add(0.04, share=1.0)

    assert plain_tokens_per_second(sums, cost, 0.0, overhead=0.0) == pytest.approx(1 / 0.045, rel=0.01)
