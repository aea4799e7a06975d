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


_DONE, _REFUSED = Library(0), Library(1)


@pytest.mark.parametrize(
    ("quality", "number", "library", "told"),
    [
        (QualityOfService.USER_INTERACTIVE, 0x21, lambda: _DONE, ""),
        (QualityOfService.UTILITY, 0x11, lambda: _DONE, ""),
        (QualityOfService.UTILITY, 0x11, lambda: _REFUSED, "not permitted"),
        (QualityOfService.UTILITY, None, absent, "no such library"),
        (QualityOfService.UTILITY, None, object, "pthread_set_qos_class_self_np"),
    ],
)
def test_the_class_of_the_calling_thread_is_set_and_a_refusal_is_told_and_ends_nothing(
    quality: QualityOfService,
    number: int | None,
    library: Any,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(sys, "platform", "darwin")

    set_quality_of_service(quality, library)

    error = capsys.readouterr().err
    assert told in error if told else error == ""
    assert number is None or library().calls.pop() == (number, 0)


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS has the library")
def test_elsewhere_no_library_is_opened():
    opened: list[None] = []

    set_quality_of_service(QualityOfService.USER_INTERACTIVE, lambda: opened.append(None))

    assert not opened
