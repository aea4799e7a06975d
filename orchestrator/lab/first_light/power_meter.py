"""Power meters: macOS's powermetrics, which needs an administrator's rights, and a Linux processor's own counter."""

import os
import plistlib
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from xml.parsers.expat import ExpatError

from orchestrator.lab.first_light.needs import RAPL

PARTS = ("cpu", "gpu", "ane")


class PowerSample(NamedTuple):
    """The energy of a stretch of time that ended at `end`, on the clock of the process that read it."""

    end: float
    seconds: float
    joules: dict[str, float]
    """By part of the machine."""

    @property
    def begin(self) -> float:
        return self.end - self.seconds


class PlistStream:
    """Takes pieces of powermetrics' output and gives the samples that are complete."""

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, piece: bytes, now: float) -> Iterator[PowerSample]:
        """The samples that `piece` completes; `now` is when it was read, which is when its last sample ended."""
        *documents, self._pending = (self._pending + piece).split(b"\0")
        if self._pending.rstrip().endswith(b"</plist>"):
            # The separator may come first, and then not before the next sample.
            documents.append(self._pending)
            self._pending = b""
        for document in documents:
            sample = parsed(document, now)
            if sample is not None:
                yield sample


def parsed(document: bytes, now: float) -> PowerSample | None:
    """A sample, or None for what is none: text between samples, or a system that states no energy."""
    try:
        content = plistlib.loads(document.strip())
    except (plistlib.InvalidFileException, ExpatError, ValueError):
        return None
    if not isinstance(content, dict) or not isinstance(content.get("processor"), dict):
        return None
    seconds = content.get("elapsed_ns", 0) / 1e9
    joules = {part: energy for part in PARTS if (energy := _joules(content["processor"], part, seconds)) is not None}
    return PowerSample(now, seconds, joules) if joules and seconds > 0 else None


def energy_between(samples: Iterable[PowerSample], begin: float, end: float) -> dict[str, float]:
    """Joules by part between two moments: a sample counts by the share of it that lies between them."""
    total: dict[str, float] = {}
    for sample in samples:
        share = max(0.0, min(end, sample.end) - max(begin, sample.begin)) / sample.seconds
        for part, joules in sample.joules.items():
            total[part] = total.get(part, 0.0) + share * joules
    return total


def counted(before: int, after: int, range_end: int) -> float:
    """Joules between two readings of a counter in microjoules, which begins again behind `range_end`."""
    return (after - before if after >= before else after + range_end - before) / 1e6


def _joules(processor: dict[str, Any], part: str, seconds: float) -> float | None:
    energy, power = processor.get(f"{part}_energy"), processor.get(f"{part}_power")
    if isinstance(energy, int | float):
        return energy / 1e3
    return power * seconds / 1e3 if isinstance(power, int | float) else None


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
    subprocess.run(["sudo", "-v"])


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
