"""The measurement of adoption times every part, on a small layout."""

from pathlib import Path

import pytest

from orchestrator.lab.first_light.adoption import measure
from protocol.kv.arena_header import ArenaLayout, ElementType


def test_every_part_of_an_adoption_is_measured_and_nothing_is_left_in_shared_memory(registry: Path):
    layout = ArenaLayout(layers=2, kv_heads=2, capacity=4096, head_size=16, dtype=ElementType.FLOAT16)
    attach, validate, copy, whole = measure(700, 3, layout)

    assert min(attach.value, copy.value) > 0 <= validate.value
    assert whole.value == pytest.approx(attach.value + validate.value + copy.value)
    assert {value.name.partition(",")[0] for value in (attach, whole)} == {"adopt 700 tokens of Qwen2.5-3B's KV"}
    assert list(registry.glob("lp-*")) == []
