"""Kernels are compiled for the processor that runs them, with the results that MLX's own have."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from protocol import kernels_folder
from protocol.kernels_folder import compile_for_this_processor

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="MLX compiles with g++")
_V3 = "fpu avx2 bmi1 bmi2 f16c fma abm movbe"
_V4 = f"{_V3} avx512f avx512bw avx512cd avx512dq avx512vl"
_KERNEL = """
import sys, mlx.core as mx
mx.set_default_device(mx.cpu)
rows = mx.random.normal((5, 1537), key=mx.random.key(3)) * 8
made = mx.compile(lambda x, y: x * mx.sigmoid(x) * y + mx.tanh(y) * mx.exp(x))(rows, rows[::-1])
sys.stdout.buffer.write(memoryview(made))
"""


@pytest.mark.parametrize(
    ("flags", "level"), [(_V4, "x86-64-v4"), (_V3, "x86-64-v3"), ("fpu sse4_2 avx", None), (None, None)]
)
def test_the_level_is_the_highest_that_the_processor_has(tmp_path, flags: str | None, level: str | None):
    facts = tmp_path / "cpuinfo"
    facts.write_text(
        "Features\t: fp asimd\n" if flags is None else f"processor\t: 0\nflags\t\t: {flags}\nflags\t\t: fpu\n"
    )

    assert kernels_folder._level(facts) == level
    assert kernels_folder._level(tmp_path / "missing") is None


@pytest.fixture
def compiler(tmp_path, monkeypatch) -> Path:
    """A g++ in PATH that writes what it was given, and knows no level."""
    programs = tmp_path / "a folder"
    programs.mkdir()
    file = programs / "g++"
    file.write_text('#!/bin/sh\ncase "$*" in *-march=*) echo unknown >&2; exit 1;; esac\necho "$@"\n')
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setattr(kernels_folder, "_level", lambda: "x86-64-v3")
    return file


def test_an_old_compiler_compiles_as_before(tmp_path, compiler):
    folder = compile_for_this_processor(tmp_path)
    found = subprocess.run(["g++", "-O3", "a b.cpp"], capture_output=True, text=True, check=True)

    assert folder == tmp_path / "x86-64-v3"
    assert shutil.which("g++") == str(folder / "bin" / "g++")
    assert (found.stdout, found.stderr) == ("-O3 a b.cpp\n", "")


def test_a_process_within_another_changes_nothing_more(tmp_path, compiler):
    folder = compile_for_this_processor(tmp_path)
    path = os.environ["PATH"]

    assert compile_for_this_processor(folder) == folder
    assert os.environ["PATH"] == path


def test_without_a_compiler_or_room_nothing_changes(tmp_path, compiler, monkeypatch):
    (tmp_path / "x86-64-v3").write_text("in the way")
    path = os.environ["PATH"]
    assert compile_for_this_processor(tmp_path) == tmp_path

    compiler.unlink()
    monkeypatch.setenv("PATH", str(compiler.parent))
    assert compile_for_this_processor(tmp_path / "other") == tmp_path / "other"
    assert path != os.environ["PATH"] == str(compiler.parent)


@needs_compiler
def test_results_are_those_of_mlx_to_the_last_bit(tmp_path):
    # Without what this process has put in front of it.
    path = os.pathsep.join(each for each in os.environ["PATH"].split(os.pathsep) if "x86-64-v" not in each)

    def computed(first: str, folder: str) -> bytes:
        (temporary := tmp_path / folder).mkdir(mode=0o700)
        return subprocess.run(
            [sys.executable, "-c", first + _KERNEL],
            env={**os.environ, "TMPDIR": str(temporary), "PATH": path},
            capture_output=True,
            check=True,
        ).stdout

    plain, ours = computed("", "plain"), computed("import protocol.inference\n", "ours")

    assert len(plain) == 5 * 1537 * 4
    assert ours == plain
