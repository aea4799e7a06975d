"""Laws of the device: all processes together wire no more than macOS recommends; a Mac's processor compiles nothing."""

import sys
from collections.abc import Iterator
from types import SimpleNamespace

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.runtime.workers.supervisor import gpu_shares
from protocol.inference.device import (
    BESIDE_TARGET,
    TARGET,
    Reserve,
    bound_freed_buffers,
    compute_on_processor,
    wire,
    wired_limit,
)
from protocol.inference.language_model import LanguageModel
from protocol.messages.base import Role
from tests.support.paths import DEMO_DRAFT

_GIB = 1 << 30
_RECOMMENDED = {8: 5_726_623_061, 16: 11_453_246_122, 24: 17_179_869_184, 64: 51_539_607_552}
"""Bytes by GiB of the machine: two thirds up to 36 GiB and three quarters above, as Metal reports them."""
_RESERVES: dict[Role, Reserve] = {"target": TARGET, "draft": BESIDE_TARGET, "prefill": BESIDE_TARGET}


def limits(recommended: int, weights: dict[Role, int]) -> dict[Role, int]:
    shares = gpu_shares(weights)
    return {
        role: wired_limit(recommended, size, shares.get(role, 1.0), _RESERVES[role].headroom)
        for role, size in weights.items()
    }


@given(
    recommended=st.sampled_from(list(_RECOMMENDED.values())),
    target=st.integers(1, 100 * _GIB),
    draft=st.integers(1, 10 * _GIB),
    prefill=st.sampled_from([None, 1, 40 * _GIB]),
)
def test_the_sum_never_exceeds_what_is_recommended(recommended: int, target: int, draft: int, prefill: int | None):
    weights: dict[Role, int] = {"target": target, "draft": draft}
    if prefill is not None:
        weights["prefill"] = prefill
    found = limits(recommended, weights)

    assert sum(found.values()) <= recommended
    assert all(found[role] <= size + _RESERVES[role].headroom for role, size in weights.items())
    if sum(weights.values()) <= recommended:
        assert all(found[role] >= size - 1 for role, size in weights.items()), "weights that fit are wired"


class Metal:
    """MLX's memory functions on an Apple GPU, which record their calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, available: bool, weights: int = 0) -> None:
        self.calls: dict[str, int] = {}
        monkeypatch.setattr(mx, "metal", SimpleNamespace(is_available=lambda: available))
        monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": _RECOMMENDED[16]})
        monkeypatch.setattr(mx, "get_active_memory", lambda: weights)
        for name in ("set_wired_limit", "set_cache_limit"):
            monkeypatch.setattr(mx, name, lambda limit, name=name: self.calls.__setitem__(name, limit))


def test_an_apple_gpu_wires_the_weights_and_bounds_the_freed_buffers(monkeypatch: pytest.MonkeyPatch):
    metal = Metal(monkeypatch, available=True, weights=3 * _GIB)

    wire(0.5, BESIDE_TARGET)

    assert metal.calls == {"set_wired_limit": 4 * _GIB, "set_cache_limit": BESIDE_TARGET.freed}


def test_without_an_apple_gpu_nothing_is_set(monkeypatch: pytest.MonkeyPatch):
    metal = Metal(monkeypatch, available=False)

    wire(1.0, TARGET)
    bound_freed_buffers(TARGET)

    assert metal.calls == {}


def test_the_installed_mlx_has_these_functions_and_this_key():
    """Its documentation names the key that only an Apple GPU has."""
    assert "set_wired_limit(limit: int) -> int" in str(mx.set_wired_limit.__doc__)
    assert "set_cache_limit(limit: int) -> int" in str(mx.set_cache_limit.__doc__)
    assert '"max_recommended_working_set_size"' in str(mx.set_wired_limit.__doc__)
    assert isinstance(mx.get_active_memory(), int)
    assert isinstance(mx.device_info(), dict)
    assert isinstance(mx.metal.is_available(), bool)


@pytest.fixture(autouse=True)
def _compiles_again() -> Iterator[None]:
    device = mx.default_device()
    yield
    mx.enable_compile()
    mx.set_default_device(device)


def calls_of_a_compiled_function() -> int:
    """How often two calls run the function: once if it is compiled, and traced for that."""
    calls = 0

    @mx.compile
    def double(x: mx.array) -> mx.array:
        nonlocal calls
        calls += 1
        return x + x

    double(mx.array([1.0]))
    double(mx.array([2.0]))
    return calls


@pytest.mark.parametrize(("platform", "calls"), [("darwin", 2), ("linux", 1)])
def test_a_process_that_moves_to_the_processor_compiles_nothing_on_macos(
    platform: str, calls: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "platform", platform)

    compute_on_processor()

    assert mx.default_device() == mx.Device(mx.cpu)
    assert calls_of_a_compiled_function() == calls


def test_nor_does_a_model_that_is_loaded_on_the_processor(monkeypatch: pytest.MonkeyPatch):
    mx.set_default_device(mx.cpu)
    monkeypatch.setattr(sys, "platform", "darwin")

    LanguageModel.load(DEMO_DRAFT)

    assert calls_of_a_compiled_function() == 2
