"""Costs by width are measured while a model loads: warm, as trees, within a time."""

import fcntl
from collections import Counter
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from protocol.inference import forward_costs
from protocol.inference.forward_costs import (
    WIDTHS,
    ForwardCosts,
    costs_at_load,
    measured_context_costs,
    measured_costs,
)
from protocol.inference.language_model import LanguageModel
from protocol.inference.layer_caches.full_attention import FullAttentionCache
from protocol.messages.base import Level
from protocol.paths import cache_folder
from tests.support.models.architectures import tiny
from tests.support.models.tiny_models import tree_model

pytestmark = pytest.mark.usefixtures("home")


class _Device:
    """A model and a clock: a forward takes as many seconds as it has tokens, and ten more at its kernel's first use."""

    vocabulary = 50
    context = 512
    level: Level = "tree"
    row_bytes: int | None = 1000

    def __init__(self, readings: Callable[[int], int] = lambda _: 0) -> None:
        """`readings`: of the context's KV by a forward's width, each of which takes a millisecond a token."""
        self.now = 0.0
        self.committed = 0
        self._readings = readings
        self.slowdown: dict[int, float] = {}
        self.used: Counter[tuple[int, bool]] = Counter()
        self.tokens: list[tuple[int, ...]] = []
        self.next_row = 0

    def clock(self) -> float:
        return self.now

    def sequence(self) -> Any:
        return self

    def prefill(self, tokens: list[int]) -> None:
        self.now += len(tokens)
        self.committed = len(tokens)

    def make_up(self, tokens: int) -> None:
        self.committed = tokens

    def truncate(self, length: int) -> None:
        assert length == self.committed

    def evaluate(self, tokens: list[int], parents: list[int]) -> mx.array:
        kernel = len(tokens), parents == [-1, *range(self.next_row, self.next_row + len(tokens) - 1)]
        behind = 0.001 * self._readings(len(tokens)) * (self.committed - 32)
        slowdown = self.slowdown.get(len(tokens), 1.0)
        self.now += slowdown * len(tokens) + behind + (0 if self.used[kernel] else 10)
        self.used[kernel] += 1
        self.tokens.append(tuple(tokens))
        self.next_row += len(tokens)
        return mx.zeros(1)


def test_every_width_is_measured_warm_as_a_chain_and_as_a_tree():
    device = _Device()

    costs = measured_costs(device, device.clock, 1e6)

    assert costs == tuple((width, float(width)) for width in range(1, 18))
    assert all(device.used[width, True] and device.used[width, False] for width in range(3, 18))


def test_tokens_vary_so_that_a_mixture_reads_many_experts():
    device = _Device()
    measured_costs(device, device.clock, 1e6)

    widest = [tokens for tokens in device.tokens if len(tokens) == max(WIDTHS)]
    assert len(set(widest)) == len(widest) == 4
    assert all(len(set(tokens)) > 10 and max(tokens) < device.vocabulary for tokens in widest)
    again = _Device()
    measured_costs(again, again.clock, 1e6)
    assert again.tokens == device.tokens


def _on_a_gpu(device: _Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_costs.mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(forward_costs.time, "perf_counter", device.clock)


@pytest.mark.parametrize(("held", "waited"), [(0, 0.0), (3, 3.0), (100, 10.0)])
def test_processes_that_share_a_gpu_measure_in_turns(held: int, waited: float, monkeypatch: pytest.MonkeyPatch):
    """Another process measures for so many seconds; nobody waits longer than ten."""
    device = _Device()
    _on_a_gpu(device, monkeypatch)
    cache_folder().mkdir(parents=True)
    other = (cache_folder() / "forward-costs.lock").open("w")
    fcntl.flock(other, fcntl.LOCK_EX)
    began: list[float] = []

    def sleep(_: float) -> None:
        device.now += 1.0
        if device.now >= held:
            other.close()

    def prefill(tokens: list[int]) -> None:
        began.append(device.now)
        device.committed = len(tokens)

    if not held:
        other.close()
    monkeypatch.setattr(forward_costs.time, "sleep", sleep)
    monkeypatch.setattr(device, "prefill", prefill)

    assert len(costs_at_load(device, 4e6).by_width) == len(WIDTHS)
    assert began == [waited]
    other.close()


def test_a_slow_model_is_measured_on_both_sides_of_the_steps_first():
    device = _Device()

    costs = measured_costs(device, device.clock, 32 + 160.0)

    assert [width for width, _ in costs] == [1, 2, 5, 6, 10, 11]
    assert device.now < 32 + 160 + 3 * 11 + 20


def test_a_model_of_one_path_is_measured_by_chains():
    device = _Device()
    device.level = "chain"

    assert len(measured_costs(device, device.clock, 1e6)) == 17
    assert not any(used for (_, chain), used in device.used.items() if not chain)


@pytest.mark.parametrize(("level", "context", "budget"), [("tree", 512, 40.0), ("plain", 512, 1e6), ("tree", 32, 1e6)])
def test_too_few_widths_are_no_measurement(level: Level, context: int, budget: float):
    """In too little time, at single tokens, or in a context too short for the widest forward."""
    device = _Device()
    device.level, device.context = level, context

    assert measured_costs(device, device.clock, budget) == ()


def test_a_real_model_is_measured_and_its_sequences_are_not_touched():
    model = tree_model()
    sequence = model.sequence()
    before = sequence.evaluate([5, 9, 2], [-1, 0, 0])
    mx.eval(before)

    costs = measured_costs(model, iter(range(10_000)).__next__, 1e6)

    again = model.sequence().evaluate([5, 9, 2], [-1, 0, 0])
    assert sorted(width for width, _ in costs) == sorted(WIDTHS)
    assert mx.array_equal(before, again)


def attention(width: int) -> int:
    """Readings of the KV by MLX's kernels for Metal."""
    return width if width <= 8 else 16


def behind(device: _Device, budget: float = 1e6) -> dict[int, float]:
    short = [(width, float(width)) for width in WIDTHS]
    return dict(measured_context_costs(device, sorted(short), device.clock, budget))


@pytest.mark.parametrize(
    ("change", "most"),
    [
        ({}, 4096),
        ({"context": 2048}, 2048 - 17),
        ({"row_bytes": 1 << 17}, 2048),
        ({"row_bytes": 1 << 19}, None),
        ({"row_bytes": 0}, None),
        ({"row_bytes": None}, None),
        ({"context": 1024}, None),
        ({"level": "chain"}, None),
    ],
)
def test_what_a_long_context_adds_is_measured_on_both_sides_of_the_steps_of_attention(
    change: dict[str, Any], most: int | None
):
    device = _Device(attention)
    device.context = 8192
    for name, value in change.items():
        setattr(device, name, value)

    found = behind(device)
    assert found == pytest.approx(found and {width: attention(width) for width in (1, 2, 4, 5, 8, 9, 16, 17)})
    assert device.committed == (most or device.committed)
    assert bool(found) is (most is not None)


def test_too_little_time_for_the_step_beyond_eight_tokens_is_no_measurement():
    device = _Device(attention)
    device.context = 8192

    assert behind(device, budget=100.0) == {}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_5"])
@pytest.mark.parametrize("kind", [mx.float32, mx.float16, mx.bfloat16])
def test_a_real_model_computes_behind_a_context_that_is_made_up(name: str, kind: mx.Dtype):
    network = tiny(name)
    network.set_dtype(kind)
    model = LanguageModel(network)
    sequence = model.sequence()
    mx.eval(sequence.prefill([5, 9, 2]))
    row = sequence.row_bytes
    arrays = sum(
        array.nbytes / array.shape[2]
        for cache in sequence.caches
        if isinstance(cache, FullAttentionCache)
        for array in cache.arrays
    )

    sequence.make_up(1500)
    mx.eval(sequence.evaluate([7, 8, 9], [-1, 0, 0]))
    sequence.truncate(sequence.committed)
    mx.eval(logits := sequence.evaluate([7, 8, 9], [-1, 3, 3]))

    assert (row, sequence.committed) == (arrays, 1500)
    assert mx.isfinite(logits).all()
    assert [sequence.position(number) for number in (3, 4, 5)] == [1500, 1501, 1501]


def test_a_processor_spends_no_time_on_it():
    device = _Device()

    assert costs_at_load(device, 3.0, contexts=True) == ForwardCosts()
    assert not device.used


def test_a_device_that_fails_while_it_is_measured_still_serves(monkeypatch: pytest.MonkeyPatch):
    def fail(tokens: list[int]) -> None:
        raise RuntimeError("[METAL] Command buffer execution failed")

    device = _Device()
    monkeypatch.setattr(device, "prefill", fail)
    monkeypatch.setattr(forward_costs.mx, "default_device", lambda: mx.Device(mx.gpu))

    assert costs_at_load(device, 1.0, contexts=True) == ForwardCosts()


def started(device: _Device, monkeypatch: pytest.MonkeyPatch, identity: str = "a", **asked: Any) -> int:
    """A start's forwards."""
    _on_a_gpu(device, monkeypatch)
    device.used.clear()
    costs = costs_at_load(device, 4e6, identity, **asked)
    assert [width for width, _ in costs.by_width] == list(range(1, 18))
    return device.used.total()


ALL, FEW = 4 * 17, (4, 8)
"""Forwards of a start that measures, and of one that looks at one width or two."""


def test_a_later_start_looks_at_two_widths_and_knows_what_the_first_one_measured(monkeypatch: pytest.MonkeyPatch):
    device = _Device(attention)
    device.context = 8192

    assert started(device, monkeypatch) == ALL
    assert started(device, monkeypatch, contexts=True) > FEW[1], "the contexts were not measured yet"
    assert started(device, monkeypatch, contexts=True) in FEW
    assert dict(costs_at_load(device, 4e6, "a", contexts=True).by_context)[9] == pytest.approx(attention(9))
    assert [started(device, monkeypatch, identity) for identity in ("", "", "b")] == [ALL] * 3
    endless = _Device(lambda _: 1_000_000)
    endless.context = 8192
    first, *later = (started(endless, monkeypatch, "c", contexts=True) for _ in range(3))
    assert first > ALL
    assert all(count in FEW for count in later), "there are none, and that is known"


def test_costs_hold_for_the_system_and_level_that_they_were_measured_on(monkeypatch: pytest.MonkeyPatch):
    started(_Device(), monkeypatch)
    for place, name, value in (
        (forward_costs, "system_build", lambda: "macOS 25A2"),
        (forward_costs, "installed_version", lambda package: f"{package} 2"),
        (forward_costs.mx, "device_info", lambda: {"device_name": "Apple M9"}),
        (_Device, "level", "chain"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, value)
            assert started(_Device(), patch) == ALL, name

    assert started(_Device(), monkeypatch) in FEW


def test_a_file_that_is_damaged_or_of_another_model_is_ignored_and_replaced(monkeypatch: pytest.MonkeyPatch):
    started(_Device(), monkeypatch)
    (file,) = (cache_folder() / "forward-costs").glob("*.json")
    whole, cost = file.read_bytes(), b"[1,1.0]"
    for damaged in (
        whole[:-1],
        *(whole.replace(cost, other) for other in (b"[1,0.0]", b"[1,1e300]", b"[19,1.0]")),
        whole.replace(b'["a",', b'["b",'),
        whole.replace(b'"asleep"', b'"awake"'),
    ):
        file.write_bytes(damaged)
        assert started(_Device(), monkeypatch) == ALL, damaged
        assert started(_Device(), monkeypatch) in FEW, damaged

    file.unlink()
    file.mkdir()
    assert [started(_Device(), monkeypatch) for _ in range(2)] == [ALL, ALL], "it can't be replaced"


SLOW = dict.fromkeys(range(1, 18), 3.0)


@pytest.mark.parametrize(
    ("before", "now", "slept", "again"),
    [
        ({}, {}, True, 0),
        ({}, SLOW, False, 0),
        ({}, SLOW, True, 1),
        ({}, dict.fromkeys(SLOW, 1.1), True, 0),
        (SLOW, {}, False, 1),
        ({11: 2.0}, {}, False, 1),
    ],
    ids=["slept", "busy", "slower", "noise, slept", "busy before", "busy at one width before"],
)
def test_stored_costs_are_measured_again_where_forwards_are_quicker_or_slower_after_a_sleep(
    before: dict[int, float], now: dict[int, float], slept: bool, again: int, monkeypatch: pytest.MonkeyPatch
):
    """By how many times as long forwards of a width take beside other work; in 200 starts every width was seen."""
    device = _Device()
    device.slowdown = before
    started(device, monkeypatch)
    device.slowdown = now
    monkeypatch.setattr(forward_costs, "seconds_asleep", lambda: 60.0 * slept)

    assert sum(started(device, monkeypatch) not in FEW for _ in range(200)) == again
