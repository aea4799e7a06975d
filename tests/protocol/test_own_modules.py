"""Modules of this program are found where it is installed, whatever the current folder holds."""

import subprocess
from pathlib import Path

from protocol.own_modules import module_command


def test_a_package_of_the_same_name_in_the_current_folder_is_not_taken(tmp_path: Path):
    """Such as another version's checkout."""
    (tmp_path / "protocol").mkdir()
    (tmp_path / "protocol" / "__init__.py").write_text("raise SystemExit(3)")

    command = module_command("protocol.own_modules")
    assert subprocess.run(command, cwd=tmp_path).returncode == 0
    assert subprocess.run([part for part in command if part != "-P"], cwd=tmp_path).returncode == 3
