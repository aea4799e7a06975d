"""Energy from a power meter's samples: parsing powermetrics' output, and the energy of a stretch of time. Pure.

The format is that of `powermetrics -f plist` (powermetrics(1): property lists, NUL-separated). Its keys are as
graelo/pumas (src/parser/plist_parsing.rs) and tlkh/asitop (asitop/parsers.py) read them: `elapsed_ns`, and in
`processor` `cpu_energy`, `gpu_energy`, `ane_energy` in millijoules of the sample; other systems have `cpu_power` and so
on, in milliwatts. By the manual the numbers are estimates: they compare strategies on one machine, not machines.
"""

import plistlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple
from xml.parsers.expat import ExpatError

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
