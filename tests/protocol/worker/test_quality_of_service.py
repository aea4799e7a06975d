"""Laws of the quality of service: one call of macOS's function, whose failure changes nothing."""

import ctypes
import sys
from typing import Any

import pytest

from protocol.processes import QualityOfService, set_quality_of_service


class Library:
    """libSystem with a C function of the signature in <pthread/qos.h>, which records its calls."""

    def __init__(self, result: int) -> None:
        self.calls: list[tuple[int, int]] = []

        def called(quality: int, priority: int) -> int:
            self.calls.append((quality, priority))
            return result

        self.pthread_set_qos_class_self_np = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint, ctypes.c_int)(called)


def absent() -> Any:
    raise OSError("no such library")


@pytest.mark.parametrize(
    ("quality", "number"), [(QualityOfService.USER_INTERACTIVE, 0x21), (QualityOfService.UTILITY, 0x11)]
)
def test_the_class_of_the_calling_thread_is_set(
    quality: QualityOfService, number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "platform", "darwin")
    library = Library(0)

    set_quality_of_service(quality, lambda: library)

    assert library.calls == [(number, 0)]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("library", "reason"),
    [(lambda: Library(1), "not permitted"), (absent, "no such library"), (object, "pthread_set_qos_class_self_np")],
)
def test_a_refusal_is_told_and_ends_nothing(
    library: Any, reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "platform", "darwin")

    set_quality_of_service(QualityOfService.UTILITY, library)

    assert reason in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS has the library")
def test_elsewhere_no_library_is_opened():
    opened: list[None] = []

    set_quality_of_service(QualityOfService.USER_INTERACTIVE, lambda: opened.append(None))

    assert not opened
