"""A process and its children may open as many files as the system allows, up to macOS's most."""

import ctypes
import resource
import subprocess
import sys
from ast import literal_eval

import pytest

from protocol.descriptors import raise_descriptor_limit

WANTED = 10_240
NOFILE, UNLIMITED = resource.RLIMIT_NOFILE, resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "raised"),
    [
        (256, UNLIMITED, (WANTED, UNLIMITED)),
        (256, 4096, (4096, 4096)),
        (256, 1 << 20, (WANTED, 1 << 20)),
        (WANTED, UNLIMITED, None),
        (1 << 16, 1 << 20, None),
        (UNLIMITED, UNLIMITED, None),
    ],
)
def test_the_soft_limit_is_raised_to_the_most_that_macos_takes_and_never_lowered(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, raised: tuple[int, int] | None
):
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: given.append(limits))

    raise_descriptor_limit()

    assert given == ([] if raised is None else [raised])


def test_a_system_that_refuses_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch):
    asked: list[object] = []

    def refused(_: int, limits: object) -> None:
        asked.append(limits)
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, UNLIMITED))
    monkeypatch.setattr(resource, "setrlimit", refused)

    raise_descriptor_limit()

    assert len(asked) == 1


def test_children_inherit_the_limit():
    program = """
import resource, subprocess, sys
from protocol.descriptors import raise_descriptor_limit
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
raise_descriptor_limit()
asked = "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
subprocess.run([sys.executable, "-c", asked])
"""
    hard = resource.getrlimit(NOFILE)[1]
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert int(told.stdout) == (WANTED if hard == UNLIMITED else min(WANTED, hard))


def _low_limit() -> None:
    """1,024 at most, as in many containers, and without root's right to raise it."""
    drop, raise_limits = 24, 24  # PR_CAPBSET_DROP and CAP_SYS_RESOURCE (linux/prctl.h, linux/capability.h)
    ctypes.CDLL(None).prctl(drop, raise_limits, 0, 0, 0)
    # Not `setrlimit`, which our own packages replace in this process.
    resource.prlimit(0, NOFILE, (1024, 1024))


@pytest.mark.skipif(sys.platform != "linux", reason="a limit that root can't raise")
@pytest.mark.parametrize(
    "module",
    ["target_worker.float32_copy", "draft_worker.engines.mlx", "orchestrator.lab.bench.mlx_lm_process"],
)
def test_programs_with_mlx_lm_start_under_a_low_limit(module: str):
    program = f"import resource, {module}; print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    told = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, preexec_fn=_low_limit)

    assert (told.stdout, told.returncode) == ("(1024, 1024)\n", 0), told.stderr


def test_mlx_lm_lowers_no_limit():
    program = "import resource as r; print(r.getrlimit(r.RLIMIT_NOFILE))"
    before = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    program = "import target_worker, mlx_lm.utils; " + program
    after = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    (soft, hard), (soft_then, hard_then) = literal_eval(before.stdout), literal_eval(after.stdout)
    assert (hard_then, soft_then >= soft) == (hard, True)
