"""Laws of the host's time between two forwards, with a network of two layers."""

from orchestrator.lab.bench.costs.micro import host_costs, host_table
from orchestrator.lab.findings import Findings
from tests.support.shown import shown


def test_the_host_is_measured_by_part_beside_mlx_lms_own_loop():
    costs = host_costs("2", "24")

    sampled = ["the same, top_p", "the same, logprobs"]
    loops = [
        "mlx-lm's loop",
        "mlx-lm's loop, top_p",
        "plain rounds",
        "plain rounds, chained",
        *sampled,
        "rounds that hit",
    ]
    assert [cost.loop for cost in costs] == [*loops, "rounds that hit, staged"]
    stock, nucleus, plain, *chained, hits, staged = costs
    for cost in (stock, nucleus, *chained):
        assert cost.idle == 0.0 < cost.host
    assert [cost.loop for cost in costs if cost.stock == nucleus.host] == [nucleus.loop, "the same, top_p"]
    assert {cost.stock for cost in costs} == {stock.host, nucleus.host}
    for cost in (plain, hits, staged):
        assert min(cost.answer, cost.commit, cost.build) > 0.0
        assert cost.idle < cost.host
    assert shown(Findings(tables=(host_table(costs),)), width=128).count("rounds") >= 2
