"""The measurement of adoption times every part, on a small layout."""

import pytest

from orchestrator.lab.first_light.adoption import measure
from protocol.kv.arena_header import ArenaLayout, ElementType


@pytest.mark.thorough
@pytest.mark.usefixtures("registry")
def test_every_part_of_an_adoption_is_measured():
    layout = ArenaLayout(layers=2, kv_heads=2, capacity=4096, head_size=16, dtype=ElementType.FLOAT16)

    small, big = measure((40, 700), 3, layout)

    assert (small.tokens, small.bytes) == (40, 40 * 2 * 2 * 2 * 16 * 2)
    assert big.bytes == 700 * small.bytes // 40
    for part in (small, big):
        assert min(part.write, part.attach, part.copy, part.copy_bandwidth) > 0
        assert part.seconds == part.attach + part.validate + part.copy
        assert part.bandwidth_share == pytest.approx(part.bytes / part.seconds / part.copy_bandwidth)


@pytest.mark.usefixtures("registry")
def test_nothing_is_left_in_shared_memory(registry):
    layout = ArenaLayout(layers=1, kv_heads=1, capacity=1024, head_size=8, dtype=ElementType.FLOAT32)
    measure((40,), 1, layout)

    assert list(registry.glob("lp-*")) == []
