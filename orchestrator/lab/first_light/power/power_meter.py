"""Power meters: macOS's powermetrics, which needs an administrator's rights, and a Linux processor's own counter."""

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from orchestrator.lab.first_light.needs import RAPL
from orchestrator.lab.first_light.power.energy import PlistStream, PowerSample, counted, energy_between

INTERVAL_MILLISECONDS = 500
_SAMPLES = 1200
"""After ten minutes it ends by itself: a process of this user can't end one of an administrator."""
COMMAND = (
    *("sudo", "-n", "powermetrics", "--samplers", "cpu_power,gpu_power,ane_power"),
    *("-i", str(INTERVAL_MILLISECONDS), "-n", str(_SAMPLES), "-b", "0", "-f", "plist"),
)
"""Options of powermetrics(1). sudo asks nothing here: see `ask_for_rights`."""
SETTLING_SECONDS = 1.5 * INTERVAL_MILLISECONDS / 1e3
"""After which the samples of a stretch of time have arrived."""


class PowerMeter(Protocol):
    """Energy since it was opened."""

    def between(self, begin: float, end: float) -> dict[str, float]:
        """Joules by part of the machine; moments of time.monotonic() that this meter has seen."""
        ...


def ask_for_rights() -> None:
    """Let sudo ask the user for the password, on the terminal. It remembers the answer for some minutes."""
    subprocess.run(["sudo", "-v"])  # noqa: S607 - wherever this system has it


@contextmanager
def powermetrics() -> Iterator[int]:
    """A descriptor with the output of powermetrics; it ends at once where `ask_for_rights` was refused.

    sudo remembers its answer for the terminal, so this runs in the process that has it.
    """
    process = subprocess.Popen(COMMAND, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield process.stdout.fileno()
    finally:
        # Its next sample finds no reader, which ends it.
        process.stdout.close()


class Powermetrics:
    """Reads samples from a descriptor until nothing writes to it any more."""

    def __init__(self, descriptor: int) -> None:
        self.samples: list[PowerSample] = []
        self._descriptor = descriptor
        self._first = threading.Event()
        threading.Thread(target=self._read, daemon=True, name="power").start()

    def ready(self, seconds: float) -> bool:
        """Whether a sample comes within this time."""
        return self._first.wait(seconds) and bool(self.samples)

    def between(self, begin: float, end: float) -> dict[str, float]:
        return energy_between(self.samples, begin, end)

    def _read(self) -> None:
        stream = PlistStream()
        while piece := os.read(self._descriptor, 1 << 16):
            self.samples += stream.feed(piece, time.monotonic())
            if self.samples:
                self._first.set()
        self._first.set()


class ProcessorCounter:
    """The counter of the first processor package: cores, caches and their memory controller."""

    def __init__(self, file: Path = RAPL) -> None:
        self._file = file
        self._range = int((file.with_name("max_energy_range_uj")).read_text())
        self._readings: dict[float, int] = {}

    def mark(self) -> float:
        """Read the counter; the moment at which that was."""
        now = time.monotonic()
        self._readings[now] = int(self._file.read_text())
        return now

    def between(self, begin: float, end: float) -> dict[str, float]:
        """Both moments are of `mark`."""
        return {"package": counted(self._readings[begin], self._readings[end], self._range)}
