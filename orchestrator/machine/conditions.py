"""What figures depend on beside hardware and versions: power, heat, memory, load. Asks the system, without sudo."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

import msgspec

Tell: TypeAlias = Callable[..., str]
"""What a program with these arguments prints; empty if it can't be run."""
_MODES = ("normal", "low power", "high power")
_PRESSURES = ("nominal", "moderate", "heavy", "trapping", "sleeping")
"""Of heat, by `OSThermalPressureLevel` of Apple's <libkern/OSThermalNotification.h>."""
_SECONDS = 10.0
_MIB = 1 << 10
"""KiB."""


class Conditions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """At one moment. Empty or None: this system does not tell."""

    power: str = ""
    """AC Power or Battery Power."""
    charge: int | None = None
    """Percent, of a battery."""
    mode: str = ""
    """normal, low power or high power."""
    thermal: str = ""
    """Pressure by heat; nominal: the system slows nothing down."""
    swap: float | None = None
    """MiB in use."""
    free_memory: int | None = None
    """Percent."""
    load: float = 0.0
    """Processes that compute or wait to, on average over a minute."""

    @property
    def speed(self) -> str:
        """What makes this machine slow or fast, in words."""
        told = self.power, self.mode and f"{self.mode} mode", self.thermal and f"heat {self.thermal}"
        return ", ".join(filter(None, told)) or "power, mode and heat not known"

    def __str__(self) -> str:
        figures = {"battery": self.charge, "MiB of swap": self.swap, "memory free": self.free_memory, "load": self.load}
        return ", ".join([self.speed, *(f"{name} {each:.3g}" for name, each in figures.items() if each is not None)])


def tell(*command: str) -> str:
    with suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False).stdout
    return ""


def conditions(tell: Tell = tell, system: str = sys.platform) -> Conditions:
    """Now."""
    load = os.getloadavg()[0]
    if system != "darwin":
        memory = tell("cat", "/proc/meminfo")
        total, free, all_swap, free_swap = (
            int(_found(rf"^{name}: +(\d+) kB", memory) or 0)
            for name in ("MemTotal", "MemAvailable", "SwapTotal", "SwapFree")
        )
        return Conditions(
            swap=(all_swap - free_swap) / _MIB, free_memory=100 * free // total if total else None, load=load
        )
    battery = tell("/usr/bin/pmset", "-g", "batt")
    charge = _found(r"(\d+)%", battery)
    # Macs with a high power mode say powermode, others lowpowermode.
    mode = _found(r"^ *(?:low)?powermode +(\d)", tell("/usr/bin/pmset", "-g"))
    heat = _found(
        r"thermalpressurelevel (\d)", tell("/usr/bin/notifyutil", "-g", "com.apple.system.thermalpressurelevel")
    )
    swap = _found(r"used = ([\d.]+)M", tell("/usr/sbin/sysctl", "-n", "vm.swapusage"))
    free = _found(r"free percentage: (\d+)%", tell("/usr/bin/memory_pressure", "-Q"))
    return Conditions(
        power=_found(r"drawing from '([^']+)'", battery),
        charge=int(charge) if charge else None,
        mode=_named(_MODES, mode),
        thermal=_named(_PRESSURES, heat),
        swap=float(swap) if swap else None,
        free_memory=int(free) if free else None,
        load=load,
    )


def is_virtual(tell: Tell = tell, system: str = sys.platform) -> bool:
    """Whether this is a virtual machine: its GPU, if it has one, is that of its host."""
    if system == "darwin":
        return tell("/usr/sbin/sysctl", "-n", "kern.hv_vmm_present").strip() == "1"
    return " hypervisor" in tell("cat", "/proc/cpuinfo")


def _found(pattern: str, text: str) -> str:
    found = re.search(pattern, text, re.MULTILINE)
    return found[1] if found else ""


def _named(names: tuple[str, ...], number: str) -> str:
    return names[int(number)] if number and int(number) < len(names) else number
