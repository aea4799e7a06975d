"""The priority of a thread: on macOS its quality-of-service class, from which the scheduler derives cores and
frequencies.

A process that was started in a terminal has none. Knows no workers.
"""

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from enum import IntEnum
from typing import Any

_NICE = 10


class QualityOfService(IntEnum):
    """`qos_class_t` of Apple's <sys/qos.h>."""

    USER_INTERACTIVE = 0x21
    """A user waits for the result."""
    UTILITY = 0x11
    """A user may watch the progress, and does not wait."""


def system_library() -> Any:
    return ctypes.CDLL("/usr/lib/libSystem.B.dylib")


def set_quality_of_service(quality: QualityOfService, library: Callable[[], Any] = system_library) -> None:
    """Set the class of the calling thread; other threads, older or newer, keep theirs. Does nothing elsewhere.

    Apple's <pthread/qos.h>: `int pthread_set_qos_class_self_np(qos_class_t, int relative_priority)`, 0 or an error
    number. After an error the thread works as before, and standard error tells the reason.
    """
    if sys.platform != "darwin":
        return
    try:
        function = library().pthread_set_qos_class_self_np
        function.argtypes, function.restype = (ctypes.c_uint, ctypes.c_int), ctypes.c_int
        if error := function(quality, 0):
            raise OSError(error, os.strerror(error))
    except (OSError, AttributeError) as error:
        sys.stderr.write(f"macOS refused the class {quality.name} for this process ({error}).\n")


def low_priority() -> None:
    """Let other threads go before the calling one, which is about to end."""
    set_quality_of_service(QualityOfService.UTILITY)
    if sys.platform == "linux":
        # There a nice value belongs to a thread.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
