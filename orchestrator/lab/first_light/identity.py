"""Which program runs a first light, and on what: for the report, and to know whether results belong together."""

import hashlib
import importlib.util
import platform
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec

from orchestrator.lab.first_light.folder import Identity
from orchestrator.lab.first_light.settings import LightSettings
from orchestrator.machine import hardware as machine_facts

_PACKAGES = ("protocol", "draft_worker", "target_worker", "orchestrator")
_LIBRARIES = ("mlx", "mlx-lm", "coremltools", "numpy")
_GIB = 1 << 30


def identity(settings: LightSettings) -> Identity:
    """Of this program on this machine with these options."""
    return Identity(program=_program(), code=_code_digest(), machine=tuple(_machine()), options=options(settings))


def options(settings: LightSettings) -> tuple[str, ...]:
    """As they are told."""
    return tuple(f"{name}: {value}" for name, value in msgspec.structs.asdict(settings).items())


def _program() -> str:
    version = machine_facts.installed_version("launch-pipeline") or "unknown version"
    checkout = Path(__file__).parents[3]
    if not (checkout / ".git").exists():
        return f"launch-pipeline {version}"
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        out = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return f"launch-pipeline {version}"
    return (
        f"launch-pipeline {version}, commit {out.stdout.strip()}"
        if out.stdout.strip()
        else f"launch-pipeline {version}"
    )


def _machine() -> Iterator[str]:
    device = machine_facts.mlx_device()
    cores = len(machine_facts.usable_cores())
    yield f"{machine_facts.chip()}, {machine_facts.memory_bytes() / _GIB:.0f} GiB, {cores} cores"
    yield f"{machine_facts.system_build()}, {platform.machine()}, Python {platform.python_version()}"
    yield f"MLX: {device}" if isinstance(device, str) else f"MLX on the {device.kind.upper()} ({device.name})"
    versions = {name: machine_facts.installed_version(name) for name in _LIBRARIES}
    yield ", ".join(f"{name} {version or 'not installed'}" for name, version in versions.items())


def _code_digest() -> str:
    """Of every source file of the program. Short, so that it is told from a key."""
    digest = hashlib.sha256()
    for package in _PACKAGES:
        found = importlib.util.find_spec(package)
        for root in (found.submodule_search_locations or ()) if found else ():
            for file in sorted(Path(root).rglob("*.py")):
                digest.update(f"\0{file.relative_to(root)}\0".encode())
                digest.update(file.read_bytes())
    return digest.hexdigest()[:12]
