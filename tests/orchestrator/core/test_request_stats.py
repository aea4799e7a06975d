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


def test_forwards_of_one_token_without_a_draft_are_plain_decoding():
    rate = plain_tokens_per_second(forwards(0.05, 0.0, (0.0,) * 8, (1,)), cost, 0.0, overhead=0.01)

    assert rate == pytest.approx(1 / 0.06)


def test_wider_forwards_are_scaled_by_their_cost():
    rate = plain_tokens_per_second(forwards(0.05, 0.0, (0.0,) * 8, (1, 4, 9)), cost, 0.0, overhead=0.0)

    assert rate == pytest.approx(20.0)


def test_plain_decoding_is_not_slowed_down_by_a_draft():
    sums = forwards(0.05, 0.6, (0.0, 0.5, 1.0) * 20, (1, 4))

    assert plain_tokens_per_second(sums, cost, 0.0, overhead=0.0) == pytest.approx(20.0, rel=0.02)


def test_a_slowdown_that_was_measured_before_holds_where_the_draft_never_rested():
    sums = forwards(0.05, 0.6, (1.0,) * 20, (1, 4))

    assert plain_tokens_per_second(sums, cost, 0.6, overhead=0.0) == pytest.approx(20.0)


def test_forwards_that_were_faster_beside_the_draft_are_no_slowdown():
    generator = random.Random(3)
    sums = {1: ForwardSums()}
    for _ in range(20):
        sums[1].add(0.05 * generator.uniform(0.99, 1.01), share=0.0)
        sums[1].add(0.04, share=1.0)

    assert plain_tokens_per_second(sums, cost, 0.0, overhead=0.0) == pytest.approx(1 / 0.045, rel=0.01)


def test_before_the_first_forward_the_cost_of_one_token_stands_for_it():
    assert plain_tokens_per_second({}, lambda _: 0.06, 0.5, overhead=0.01) == pytest.approx(1 / 0.05)
