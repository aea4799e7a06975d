"""Laws of what is said about the machine: cores are shared out whole, and what is missing has a next step."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.options import Options
from orchestrator.machine import hardware
from orchestrator.machine.blas.library import Blas, ForwardTimes
from orchestrator.machine.hardware import MlxDevice, partition, worker_environment
from orchestrator.machine.placement import shared_device, worker_cores
from orchestrator.runtime import doctor
from tests.support.paths import ROOT

_BLAS = Blas("0.3.31", "NumPy's wheel", {"LD_PRELOAD": "libblas.so.3"})


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Linux machine of eight cores without OpenBLAS, whose MLX computes on the processor."""
    monkeypatch.setattr(hardware, "computes_on_processor", lambda: True)
    monkeypatch.setattr(hardware, "usable_cores", lambda: tuple(range(8)))
    monkeypatch.setattr(hardware, "fast_blas", lambda: None)
    monkeypatch.setattr(hardware, "blas_environment", dict)


@given(st.lists(st.integers(0, 500), min_size=2, unique=True))
def test_cores_are_shared_out_without_rest_or_overlap(cores: list[int]):
    shares = partition(cores)

    assert [*shares["target"], *shares["draft"]] == cores
    assert len(shares["draft"]) == max(1, len(cores) // 4)


def test_with_a_gpu_nothing_is_pinned_or_preloaded_or_lacking(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hardware, "computes_on_processor", lambda: False)
    monkeypatch.setattr(hardware, "fast_blas", lambda: None)

    assert hardware.partition_cores() == {}
    assert not {"LD_PRELOAD", "OPENBLAS_NUM_THREADS"} & worker_environment("target", ()).keys()
    assert not hardware.lacks_fast_blas()


@pytest.mark.usefixtures("processor")
def test_a_worker_gets_as_many_threads_as_cores():
    assert worker_environment("target", (0, 1, 2))["OPENBLAS_NUM_THREADS"] == "3"
    assert ("MALLOC_MMAP_THRESHOLD_" in worker_environment("target", ())) is (sys.platform == "linux")
    assert worker_environment("target", ())["OPENBLAS_NUM_THREADS"] == "6"
    assert worker_environment("draft", ())["OPENBLAS_NUM_THREADS"] == "2"


@pytest.mark.usefixtures("processor")
def test_workers_on_a_processor_get_the_fast_blas(monkeypatch: pytest.MonkeyPatch):
    assert hardware.lacks_fast_blas()
    monkeypatch.setattr(hardware, "fast_blas", lambda: _BLAS)
    monkeypatch.setattr(hardware, "blas_environment", lambda: _BLAS.environment)

    assert not hardware.lacks_fast_blas()
    assert worker_environment("draft", (0,))["LD_PRELOAD"] == "libblas.so.3"


def test_mlx_is_asked_in_a_child():
    script = (
        "import sys; from orchestrator.machine.hardware import mlx_device; device = mlx_device(); "
        "print('mlx.core' in sys.modules, device.kind in ('cpu', 'gpu'), len(device.name) > 0)"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)

    assert (out.stdout.split(), out.stderr) == (["False", "True", "True"], "")


def test_why_mlx_can_not_be_had_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hardware, "_QUESTION", "raise ImportError('no wheel for this system')")

    assert hardware.mlx_device.__wrapped__() == "ImportError: no wheel for this system"


_TIGHT = 1 << 20


@pytest.mark.parametrize(
    ("groups", "limits", "bytes"),
    [
        ("0::/", {"memory.max": "1048576\n"}, _TIGHT),
        ("0::/", {"memory.max": str(1 << 60)}, None),
        ("0::/", {"memory.max": "max\n"}, None),
        ("0::/", {"memory.max": ""}, None),
        ("0::/user.slice/app.service", {"user.slice/app.service/memory.max": "1048576\n"}, _TIGHT),
        ("0::/a/b", {"a/memory.max": "1048576\n", "a/b/memory.max": "max\n"}, _TIGHT),
        ("5:cpu:/a\n4:memory:/a", {"memory/a/memory.limit_in_bytes": "1048576\n"}, _TIGHT),
        ("4:cpu,memory:/docker/1", {"memory/memory.limit_in_bytes": "1048576\n"}, _TIGHT),
        ("4:memory:/", {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, None),
        ("", {"memory.max": "1048576\n"}, None),
    ],
)
def test_the_limit_of_a_container_or_a_service_is_its_memory(
    groups: str, limits: dict[str, str], bytes: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    _in_groups("", {}, tmp_path, monkeypatch)
    physical = hardware.memory_bytes()
    _in_groups(groups, limits, tmp_path, monkeypatch)

    assert hardware.memory_bytes() == (bytes or physical)


@pytest.mark.parametrize(
    ("groups", "limits", "count"),
    [
        ("0::/", {"cpu.max": "200000 100000\n"}, 2),
        ("0::/", {"cpu.max": "150000 100000\n"}, 2),
        ("0::/", {"cpu.max": "5000 100000\n"}, 1),
        ("0::/", {"cpu.max": "max 100000\n"}, 8),
        ("0::/", {"cpu.max": "6400000 100000\n"}, 8),
        ("0::/", {"cpu.max": "100000 0\n"}, 8),
        ("0::/a/b", {"a/cpu.max": "300000 100000\n", "a/b/cpu.max": "max 100000\n"}, 3),
        ("3:cpu,cpuacct:/a", {"cpu/a/cpu.cfs_quota_us": "100000\n", "cpu/a/cpu.cfs_period_us": "50000\n"}, 2),
        ("3:cpu,cpuacct:/a", {"cpu/a/cpu.cfs_quota_us": "-1\n", "cpu/a/cpu.cfs_period_us": "100000\n"}, 8),
    ],
)
def test_the_quota_of_a_container_or_a_service_is_its_number_of_cores(
    groups: str, limits: dict[str, str], count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    _in_groups(groups, limits, tmp_path, monkeypatch)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    cores = hardware.usable_cores()

    assert len(cores) == len({*cores} & {*range(8)}) == count


def _in_groups(groups: str, limits: dict[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, limit in limits.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(limit)
    (folder / "groups").write_text(groups)
    monkeypatch.setattr(hardware, "_OWN_GROUPS", folder / "groups")
    monkeypatch.setattr(hardware, "_GROUPS", folder)


@pytest.mark.parametrize(
    ("finding", "status", "step"),
    [
        (doctor.mlx("ImportError: no wheel"), "fail", "/.venv and start"),
        (doctor.openblas(None, ForwardTimes(0.01, 0.08)), "warn", "libopenblas0-pthread"),
        (doctor.memory(1 << 30), "warn", "demo pair"),
        (doctor.shared_memory(64 << 20), "warn", "--shm-size"),
        (doctor.mlx(MlxDevice("0.32", "gpu", "Apple M4")), "ok", None),
        (doctor.openblas(_BLAS, ForwardTimes(0.01, 0.012)), "ok", None),
        (doctor.openblas(_BLAS, None), "ok", None),
        (doctor.memory(16 << 30), "ok", None),
        (doctor.shared_memory(None), "ok", None),
        (doctor.shared_memory(1 << 30), "ok", None),
    ],
)
def test_what_is_missing_has_a_next_step(finding: doctor.Check, status: str, step: str | None):
    assert finding.status == status
    assert (finding.next_step is None) == (step is None)
    assert step is None or step in (finding.next_step or "")


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("no-such-package>=2", "no-such-package is not installed"),
        ("no-such-package>=2; python_version >= '3.11'", "no-such-package is not installed"),
        ("numpy>=999", "numpy is 2.0 and must be >=999"),
        ("Numpy[extra]<1,>=0.5", "Numpy is 2.0 and must be <1,>=0.5"),
        ("numpy>=999; sys_platform != 'plan9'", "numpy is 2.0 and must be >=999"),
    ],
)
def test_a_package_that_is_missing_or_too_old_is_named(monkeypatch: pytest.MonkeyPatch, line: str, text: str):
    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda _: ["numpy>=1", line])
    monkeypatch.setattr(hardware, "installed_version", {"numpy": "2.0", "Numpy": "2.0"}.get)

    assert (doctor.packages().status, doctor.packages().text) == ("fail", text)


@pytest.mark.parametrize(
    "condition",
    [
        "sys_platform == 'plan9'",
        "python_version < '3.11'",
        "platform_machine == 'vax'",
        "sys_platform == 'plan9' or python_full_version < '3'",
        "extra == 'dev'",
    ],
)
def test_requirements_of_other_environments_are_not_needed(monkeypatch: pytest.MonkeyPatch, condition: str):
    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda _: [f"no-such-package; {condition}"])

    assert doctor.packages().status == "ok"


def test_one_core_is_worth_a_warning_and_an_unwritable_temporary_folder_is_a_failure(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hardware, "computes_on_processor", lambda: True)
    monkeypatch.setattr(hardware, "usable_cores", lambda: (0,))
    monkeypatch.setattr(doctor.tempfile, "gettempdir", lambda: "/proc/nowhere")

    assert (doctor.cores().status, doctor.temporary_folder().status) == ("warn", "fail")


# Where draft and target begin --------------------------------------------------------------------


@pytest.fixture
def cores_of(monkeypatch: pytest.MonkeyPatch):
    """A machine whose models compute on so many cores; 0 for one with a GPU."""

    def has(cores: int) -> None:
        monkeypatch.setattr(hardware, "computes_on_processor", lambda: cores > 0)
        monkeypatch.setattr(hardware, "usable_cores", lambda: tuple(range(cores)))

    return has


@pytest.mark.parametrize(
    ("options", "where", "shared"),
    [
        # Few cores are shared, and one GPU; a device of its own is not, and the devices of a profile are apart.
        ({}, {}, {0: True, 1: True, 3: True, 4: False, 16: False}),
        ({}, {"own_device": True}, {0: False}),
        ({}, {"paced": True}, {0: False, 2: False, 16: False}),
        # The user decides.
        ({"placement": "shared"}, {"paced": True}, {0: True, 2: True, 16: True}),
        ({"placement": "shared"}, {"own_device": True}, {0: True}),
        ({"placement": "apart"}, {}, {2: False}),
        # A strategy that never drafts beside the target shares.
        ({"strategy": "ar"}, {}, {0: True, 2: True, 16: True}),
        ({"strategy": "sd"}, {}, {0: True, 2: True, 16: True}),
        ({"strategy": "ssd"}, {}, {0: False, 2: False, 16: False}),
    ],
)
def test_where_the_draft_begins(cores_of, options: dict[str, Any], where: dict[str, bool], shared: dict[int, bool]):
    for cores, expected in shared.items():
        cores_of(cores)

        assert shared_device(Options(**options), **{"own_device": False, **where}) is expected, cores


def test_cores_are_all_or_divided(cores_of):
    cores_of(4)

    assert worker_cores(shared_device=True) == {"target": (0, 1, 2, 3), "draft": (0, 1, 2, 3)}
    assert worker_cores(shared_device=False) == {"target": (0, 1, 2), "draft": (3,)}
    cores_of(0)
    assert worker_cores(shared_device=True) == worker_cores(shared_device=False) == {}
