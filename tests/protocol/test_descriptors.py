"""Programs with mlx-lm start under a low limit of descriptors, and mlx-lm lowers none."""

import ctypes
import resource
import subprocess
import sys
from ast import literal_eval

import pytest

NOFILE = resource.RLIMIT_NOFILE


def _low_limit() -> None:
    """1,024 at most, as in many containers, and without root's right to raise it."""
    drop, raise_limits = 24, 24  # PR_CAPBSET_DROP and CAP_SYS_RESOURCE (linux/prctl.h, linux/capability.h)
    ctypes.CDLL(None).prctl(drop, raise_limits, 0, 0, 0)
    # Not `setrlimit`, which our own packages replace in this process. macOS's `resource` lacks it.
    getattr(resource, "prlimit")(0, NOFILE, (1024, 1024))  # noqa: B009


@pytest.mark.sampled(1)
@pytest.mark.skipif(sys.platform != "linux", reason="a limit that root can't raise")
@pytest.mark.parametrize(
    "module",
    ["target_worker.model_examination", "draft_worker.engines.mlx", "orchestrator.lab.bench.mlx_lm_process"],
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
