"""Examines this machine: what is missing, and the next step. Changes nothing and prints nothing. Imports no MLX."""

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from packaging.requirements import Requirement

from orchestrator.machine import hardware as machine_facts
from orchestrator.machine.blas.library import HOW_TO_GET_ONE, Blas, ForwardTimes, fast_blas, forward_times
from orchestrator.machine.check import Check
from orchestrator.machine.checkpoints import demo_model
from orchestrator.machine.default_target import VARIABLE, default_pair_state
from orchestrator.machine.hardware import MlxDevice
from orchestrator.machine.network import own_host
from orchestrator.machine.placement import usual_cores
from orchestrator.runtime.session import stale_sessions
from protocol.contracts.coreml import EngineVerdict, all_recorded
from protocol.contracts.model_folder import ModelFolder
from protocol.errors import PipelineError
from protocol.kv.segments import free_shared_memory, stale_segments
from protocol.messages.base import Role
from protocol.paths import segments_folder, sessions_folder
from protocol.system import system_build

_SW_VERS = "/usr/bin/sw_vers"


def metal_wheel_target() -> int | None:
    """The major version of macOS that the installed wheel of mlx-metal was built for; None without such a wheel.

    A wheel's tags are in its WHEEL file: https://packaging.python.org/specifications/binary-distribution-format.
    """
    try:
        text = importlib.metadata.distribution("mlx-metal").read_text("WHEEL") or ""
    except importlib.metadata.PackageNotFoundError:
        return None
    versions = [int(found[1]) for found in re.finditer(r"^Tag:.*-macosx_(\d+)_\d+_", text, re.MULTILINE)]
    return max(versions, default=None)


def macos_version(program: str = _SW_VERS) -> str:
    """The version of macOS, such as 26.1; empty if it can't be asked for.

    Python itself may be told an older one (CPython issue 135675), and so would `sw_vers` with SYSTEM_VERSION_COMPAT=1.
    """
    environment = {**os.environ, "SYSTEM_VERSION_COMPAT": "0"}
    try:
        out = subprocess.run([program, "-productVersion"], capture_output=True, text=True, env=environment, check=False)
    except OSError:
        return ""
    return out.stdout.strip()


_BUILDS = (14, 15, 26)
"""The versions of macOS for which the package index has builds of mlx-metal 0.32. That for 26 alone has the kernels for
the matrix units of the M5 (ml-explore/mlx issue 3821)."""


def metal_kernels(system: str, built_for: int | None) -> Check:
    """`system`: the version of macOS, empty if unknown. `built_for`: the major one that the installed wheel names."""
    major = system.partition(".")[0]
    if built_for is None or not major.isdecimal():
        return Check("Metal kernels", "ok", "not from a wheel of the package index")
    best = max((build for build in _BUILDS if build <= int(major)), default=built_for)
    if built_for >= best:
        return Check("Metal kernels", "ok", f"built for macOS {built_for}; this is macOS {system}")
    # Of mlx too: both are always the same.
    mlx = machine_facts.installed_version("mlx-metal")
    return Check(
        "Metal kernels",
        "warn",
        f"built for macOS {built_for}, and this is macOS {system}: the build for macOS {best} has faster kernels",
        f"SYSTEM_VERSION_COMPAT=0 python -m pip install --force-reinstall --no-deps mlx=={mlx} mlx-metal=={mlx} "
        "(with uv: uv pip install --reinstall --no-deps ...), with the Python that runs launch-pipeline",
    )


_GIB = 1 << 30
_CHECKOUT = Path(__file__).parents[2]
_NOT_FOR_ALL = "another terminal program, or a launchd agent, may be refused without a word"
_ROLES: tuple[Role, ...] = ("target", "draft")


def examine() -> list[Check]:
    """All checks before a pipeline starts, the most basic first."""
    return [
        *(python(), packages(), mlx(machine_facts.mlx_device())),
        *_linux_processor(),
        *([metal_kernels(macos_version(), metal_wheel_target())] if sys.platform == "darwin" else []),
        *(cores(), memory(machine_facts.memory_bytes()), shared_memory(free_shared_memory())),
        *(temporary_folder(), leftovers(), local_network(own_host()), default_pair(), demo_pair()),
        *neural_engine(),
    ]


_INSTALLERS = {
    "uv-receipt.toml": "uv tool upgrade --reinstall{} launch-pipeline",
    "pipx_metadata.json": "pipx reinstall{} launch-pipeline",
}
"""By the file that each leaves in the environment."""


def reinstall(folder: Path = _CHECKOUT, *, python: bool = False) -> str:
    """The next step if something of the installation is missing, or if its `python` does not fit; by whatever installed
    it. `folder`: where the packages are."""
    if (folder / "bin" / "launch-pipeline").is_file():
        if python:
            # In the words of its set-up, which knows what is here.
            how = ["bash", "-c", '. "$0/bin/.bootstrap"; how_to_install', str(folder)]
            words = subprocess.run(how, capture_output=True, text=True, check=False).stdout
            return f"install another Python ({words}), then start bin/launch-pipeline again: it makes .venv again"
        return f"delete {folder}/.venv and start bin/launch-pipeline again; if that is not enough, clone it again"
    if "/Cellar/launch-pipeline/" in sys.prefix:
        return "brew reinstall launch-pipeline"
    for file, command in _INSTALLERS.items():
        if (Path(sys.prefix) / file).is_file():
            return command.format(" --python 3.13" * python)
    if python and (Path(sys.base_prefix) / "conda-meta").is_dir():
        return "conda create --name launch-pipeline python=3.13, then install launch-pipeline in that environment"
    if python:
        return "install launch-pipeline in a virtual environment of Python 3.13 (https://www.python.org/downloads)"
    pip = f"{sys.executable} -m pip" if importlib.util.find_spec("pip") else "uv pip"
    return f"SYSTEM_VERSION_COMPAT=0 {pip} install --force-reinstall launch-pipeline"


def python() -> Check:
    version = platform.python_version()
    if sys.platform == "darwin" and platform.machine() != "arm64":
        return Check("Python", "fail", f"{version} for Intel: MLX needs Apple silicon", reinstall(python=True))
    return Check("Python", "ok", f"{version} on {platform.system()} {platform.machine()}")


def packages() -> Check:
    try:
        lines = importlib.metadata.requires("launch-pipeline") or []
    except importlib.metadata.PackageNotFoundError:
        return Check("packages", "fail", "launch-pipeline itself is not installed", reinstall())
    unmet = list(_unmet(lines))
    if unmet:
        return Check("packages", "fail", "; ".join(unmet), reinstall())
    return Check("packages", "ok", "all installed")


def mlx(answer: MlxDevice | str) -> Check:
    if isinstance(answer, str):
        return Check("MLX", "fail", f"can't be used: {answer}", reinstall())
    return Check("MLX", "ok", f"{answer.version} on the {answer.kind.upper()} ({answer.name})")


def openblas(blas: Blas | None, times: ForwardTimes | None) -> Check:
    """`times`: of a forward with it, or with MLX's own BLAS."""
    speed = "no forward could be measured"
    if times is not None:
        speed = f"a forward over 8 tokens takes {times.eight / times.one:.1f} times as long as over 1"
    if blas is None:
        return Check("OpenBLAS", "warn", f"none: speculation can't help here; {speed}", HOW_TO_GET_ONE)
    return Check("OpenBLAS", "ok", f"{blas}; {speed}")


def cores() -> Check:
    usable = machine_facts.usable_cores()
    about = f"{len(usable)} of {machine_facts.chip()}"
    shares = usual_cores()
    if not shares:
        return Check("cores", "ok", f"{about}; the models run elsewhere or share them")
    if len(usable) == 1:
        return Check(
            "cores", "warn", f"{about}: draft and target take turns on it", "use two or more cores, or --strategy ar"
        )
    if shares["target"] == shares["draft"]:
        return Check("cores", "ok", f"{about}: draft and target share them, in turns")
    return Check("cores", "ok", f"{about}: target {len(shares['target'])}, draft {len(shares['draft'])}")


def memory(total: int) -> Check:
    text = f"{total / _GIB:.0f} GiB"
    if total < 2 * _GIB:
        return Check("memory", "warn", text, "stay with the demo pair or models of less than 1 GiB")
    return Check("memory", "ok", text)


def shared_memory(free: int | None) -> Check:
    if free is None:
        return Check("shared memory", "ok", "no limit of its own")
    text = f"{free / _GIB:.1f} GiB free"
    if free < _GIB // 8:
        return Check(
            "shared memory",
            "warn",
            f"{text}: KV stays in the workers' own memory, so a restarted target reads prompts again",
            "enlarge /dev/shm (in Docker: --shm-size=2g), or end what fills it",
        )
    return Check("shared memory", "ok", text)


def temporary_folder() -> Check:
    """Sockets live under a short path, and shared memory is listed in a folder of its own."""
    for folder in (_nearest(sessions_folder()), _nearest(segments_folder()), Path(tempfile.gettempdir())):
        try:
            with tempfile.TemporaryFile(dir=folder):
                free = shutil.disk_usage(folder).free
        except OSError as error:
            return Check(
                "temporary folder", "fail", f"{folder}: {error.strerror}", f"make {folder} writable, or free some space"
            )
    return Check("temporary folder", "ok", f"{folder}, {free / _GIB:.0f} GiB free")


def _nearest(folder: Path) -> Path:
    """The folder that is there, of it and those above."""
    return next(above for above in (folder, *folder.parents) if above.exists())


def leftovers() -> Check:
    try:
        segments, sessions = stale_segments(), stale_sessions()
    except PipelineError as error:
        return Check("leftovers", "fail", str(error))
    if not segments and not sessions:
        return Check("leftovers", "ok", "none of dead pipelines")
    text = f"{len(segments)} shared-memory segments and {len(sessions)} session folders of dead pipelines"
    return Check("leftovers", "warn", text, "start a pipeline: it removes them")


def local_network(own: str | None, system: str = sys.platform, reach: Callable[[], None] | None = None) -> Check:
    """Whether this program can reach other machines. macOS asks the user for each program, except for what runs in
    Terminal or over SSH (Apple's technote TN3179), and hides the network from a program without permission; `reach`
    (default: a multicast datagram) raises OSError then."""
    if own is None:
        return Check("local network", "ok", "none: workers of other machines can't come, all else works")
    if system != "darwin":
        return Check("local network", "ok", f"this machine is {own} there")
    try:
        (reach or _multicast)()
    except OSError as error:
        return Check(
            "local network",
            "warn",
            f"this machine is {own} there, but this program can't reach it ({error.strerror})",
            "System Settings > Privacy & Security > Local Network: allow the terminal program and Python, then start "
            "again; in Terminal and over SSH no permission is needed",
        )
    return Check("local network", "ok", f"this machine is {own} there, and may speak to others; {_NOT_FOR_ALL}")


def _multicast() -> None:
    """An empty datagram to the multicast group of mDNS (RFC 6762). A system that forbids it raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.sendto(b"", ("224.0.0.251", 5353))


def default_pair() -> Check:
    try:
        return Check("default pair", "ok", str(default_pair_state()))
    except PipelineError as error:
        return Check("default pair", "fail", str(error), f"set {VARIABLE} to one of these, or unset it")


def demo_pair() -> Check:
    try:
        for role in _ROLES:
            ModelFolder(demo_model(role)).examined_tensors()
    except PipelineError as error:
        return Check("demo pair", "fail", str(error), reinstall())
    return Check("demo pair", "ok", "target and draft are complete")


def neural_engine(system: str = sys.platform) -> list[Check]:
    if system != "darwin":
        text = "none: --draft-engine coreml runs its package by an executor, which is no Neural Engine"
        return [Check("Neural Engine", "ok", text)]
    if machine_facts.installed_version("coremltools") is None:
        text = f"coremltools is not installed, which has no release for Python {platform.python_version()}: no draft"
        return [Check("Neural Engine", "warn", f"{text} can run there", reinstall(python=True))]
    this = system_build(), machine_facts.chip()
    here = [each for each in all_recorded() if (each.place.system, each.place.chip) == this]
    text = "--draft-engine auto tries a draft there; launch-pipeline doctor --neural-engine examines one"
    return [Check("Neural Engine", "ok", text), *map(verdict, here)]


def verdict(recorded: EngineVerdict) -> Check:
    """What was found out before about a draft on the Neural Engine."""
    where = {"coreml": "on the Neural Engine", "mlx": "in MLX"}.get(recorded.choice, "in MLX until a quiet start")
    name = recorded.model or f"package {recorded.place.package[:12]}"
    again = None
    if recorded.choice != "coreml" and recorded.rates is None:
        again = "launch-pipeline doctor --neural-engine, with --draft MODEL, examines it again"
    return Check("draft engine", "ok", f"{name}: {where} ({recorded.reason})", again)


def _linux_processor() -> list[Check]:
    if not machine_facts.computes_on_processor():
        return []
    times = forward_times(machine_facts.worker_environment("target", ()))
    return [openblas(fast_blas(), times)]


def _unmet(lines: Iterable[str]) -> Iterator[str]:
    """The requirements of this environment, without extras, that no installed package meets, as text."""
    for requirement in map(Requirement, lines):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = machine_facts.installed_version(requirement.name)
        if version is None:
            yield f"{requirement.name} is not installed"
        elif not requirement.specifier.contains(version, prereleases=True):
            yield f"{requirement.name} is {version} and must be {requirement.specifier}"
