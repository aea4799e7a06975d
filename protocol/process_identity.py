"""Start times of processes, which identify them: process ids are reused. Knows Linux's /proc and macOS's ps."""

import subprocess
from pathlib import Path


def start_time(pid: int) -> str | None:
    """When process `pid` began, in a form that can only be compared on this machine; None if it has ended.

    A killed process that its parent has not yet collected counts as ended.
    """
    return _from_proc(pid) if Path("/proc/self/stat").exists() else _from_ps(pid)


def _from_proc(pid: int) -> str | None:
    """Field 22 of /proc/PID/stat, in ticks since boot (man 5 proc)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name in parentheses may itself hold blanks and parentheses.
    state, *rest = stat.rpartition(")")[2].split()
    return None if state in "ZX" else rest[18]


def _from_ps(pid: int) -> str | None:
    out = subprocess.run(
        ["/bin/ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True, env={"LC_ALL": "C"}
    )
    state, _, started = out.stdout.strip().partition(" ")
    return None if out.returncode or not started or state.startswith("Z") else started.strip()
