"""Laws of the processor: on macOS nothing is compiled there, because a Mac may have no compiler."""

import sys
from collections.abc import Iterator

import mlx.core as mx
import pytest

from protocol.inference.device import compute_on_processor
from protocol.inference.language_model import LanguageModel
from tests.support.paths import DEMO_DRAFT


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
