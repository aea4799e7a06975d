"""What a step of a trained drafter costs the host at a real vocabulary. `tests.support.real_sizes` prints tables."""

import mlx.core as mx
import pytest

from protocol.inference.device import compute_on_processor
from tests.support.real_sizes import KINDS, Ends, block_runner, costs, host_seconds

VOCABULARY = 248_320


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("kind", ["DFlash", "DFlash2", "JetSpec", "P-EAGLE"])
def test_sixteen_nodes_with_sixteen_candidates_each_take_the_host_a_millisecond_at_most(kind: str, temperature: float):
    """Processor time, the fastest of many steps inside a block of 8."""
    compute_on_processor()
    runner, _, _ = block_runner(kind, 8, 128, VOCABULARY, Ends(mx.zeros((VOCABULARY, 128))))

    assert host_seconds(runner, temperature, 100).inside <= 1e-3


@pytest.mark.slow
def test_the_costs_of_every_kind_can_be_measured():
    compute_on_processor()
    found = costs(128, 1000, blocks=(8,), context=64)

    assert tuple(each.kind for each in found) == KINDS
    assert all(each.forward > 0 and each.ring_row == 2 * 128 * (3 if "EAGLE" in each.kind else 5) for each in found)
