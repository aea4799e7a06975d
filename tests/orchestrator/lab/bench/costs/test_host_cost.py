"""Laws of the host's time between two forwards, with a network of two layers."""

from orchestrator.lab.bench.costs.micro import findings, host_costs
from tests.support.shown import shown


def test_the_host_is_measured_by_part_beside_mlx_lms_own_loop():
    costs = host_costs("2", "24")

    sampled = ["the same, top_p", "the same, logprobs"]
    loops = ["mlx-lm's loop", "plain rounds", "plain rounds, chained", *sampled, "rounds that hit"]
    assert [cost.loop for cost in costs] == [*loops, "rounds that hit, staged"]
    stock, plain, *chained, hits, staged = costs
    for cost in (stock, *chained):
        assert cost.idle == 0.0 < cost.host
    assert {cost.stock for cost in (plain, *chained, hits, staged)} == {stock.host}
    for cost in (plain, hits, staged):
        assert min(cost.answer, cost.commit, cost.build) > 0.0
        assert cost.idle < cost.host
    assert shown(findings([], [], costs), width=128).count("rounds") >= 2
