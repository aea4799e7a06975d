"""The compiled bridges are what their source says: a compiler from the package index makes the same bytes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

_FOLDER = ROOT / "orchestrator/machine/blas"


def test_both_bridges_are_compiled_from_the_source(tmp_path: Path):
    source = (_FOLDER / "bridge.c").read_text()
    [version] = re.findall(r"ziglang (\S+) from", source)
    arguments = re.findall(r"ziglang (cc .*) \\\n \*\s+(.*)\n", source)[0]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(tmp_path / "zig"), f"ziglang=={version}"]
    subprocess.run(pip, check=True)
    (tmp_path / "bridge.c").write_text(source)
    for processor in ("x86_64", "aarch64"):
        command = " ".join(arguments).replace("PROCESSOR", processor).split()
        environment = {**os.environ, "PYTHONPATH": str(tmp_path / "zig"), "HOME": str(tmp_path)}
        subprocess.run([sys.executable, "-m", "ziglang", *command], cwd=tmp_path, env=environment, check=True)

        name = f"bridge-{processor}.so"
        same = (tmp_path / name).read_bytes() == (_FOLDER / name).read_bytes()
        assert same, f"{name} is of another source: make it by the command in bridge.c"
