"""Law of the commands in `bin`: they run where iCloud hides the files of .venv."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.bin.test_bootstrap import BASH, LOCKED
from tests.support.paths import ROOT


@pytest.mark.thorough
def test_the_command_runs_where_site_skips_the_file_that_names_the_checkout(tmp_path: Path):
    """iCloud hides what is in .venv, and site skips hidden files: here every .pth file is gone.

    The pipeline's processes are started by the command, and must find the packages as well.
    """
    checkout = tmp_path / "check out"
    _with_environment_without_pth(checkout)
    settings = {**os.environ, "HOME": str(tmp_path), "PYTHONPATH": ""}
    out = subprocess.run(
        [BASH, str(checkout / "bin/launch-pipeline"), "generate", "import os", "--max-tokens", "2"],
        env=settings,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert out.returncode == 0, out.stderr
    assert out.stdout.strip()


def _with_environment_without_pth(checkout: Path) -> None:
    """A checkout whose .venv is in step and holds what is installed here, except .pth files."""
    environment = checkout / ".venv"
    packages = Path(sysconfig.get_path("purelib"))
    ours = environment / packages.relative_to(sys.prefix)
    ours.mkdir(parents=True)
    for entry in packages.iterdir():
        if entry.suffix != ".pth":
            (ours / entry.name).symlink_to(entry)
    (environment / "bin").mkdir()
    (environment / "bin" / "python").symlink_to(Path(sys.executable).resolve())
    shutil.copy(Path(sys.prefix) / "pyvenv.cfg", environment)
    shutil.copytree(ROOT / "bin", checkout / "bin")
    for name in ("protocol", "draft_worker", "target_worker", "orchestrator"):
        (checkout / name).symlink_to(ROOT / name)
    for name in LOCKED:
        shutil.copy(ROOT / name, checkout)
    # As `fingerprint` in bin/.bootstrap writes it.
    sums = [subprocess.check_output(["cksum"], input=(checkout / name).read_bytes()).decode() for name in LOCKED]
    (environment / "stamp").write_text(f"{checkout}\n{''.join(sums)}")
