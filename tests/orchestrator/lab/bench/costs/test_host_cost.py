"""Laws of the host's time between two forwards, with a network of two layers."""

from orchestrator.lab.bench.costs.micro import findings, host_costs
from tests.support.shown import shown


def test_the_host_is_measured_by_part_beside_mlx_lms_own_loop():
    costs = host_costs("2", "24")

    assert [cost.loop for cost in costs] == ["mlx-lm's loop", "plain rounds", "rounds that hit"]
    stock, plain, hits = costs
    assert stock.idle == 0.0 < stock.host == plain.stock == hits.stock
    for cost in (plain, hits):
        assert min(cost.answer, cost.commit, cost.build) > 0.0
        assert cost.idle < cost.host
    assert shown(findings([], [], costs), width=128).count("rounds") >= 2
