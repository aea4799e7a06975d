"""Kernels that MLX compiles lie in a private folder, whoever may write the temporary one."""

import ast
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import grimp
import pytest

OURS = "import protocol.inference\n"
KERNEL = "import mlx.core as mx\nmx.set_default_device(mx.cpu)\n" + (
    "mx.eval(mx.compile(lambda x: mx.exp(x) * x + 1)(mx.ones(4)))"
)
PLANTED = '__attribute__((constructor)) static void f(void) { fclose(fopen("%s", "w")); }'
PACKAGES = ("protocol", "draft_worker", "target_worker", "orchestrator")

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="MLX compiles with g++")


def run(program, **variables):
    return subprocess.run(
        [sys.executable, "-P", "-c", program],
        env={**os.environ, **{name: str(value) for name, value in variables.items()}},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


@pytest.fixture
def shared(tmp_path):
    """A temporary folder that every user may write, as /tmp."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


@needs_compiler
def test_a_planted_kernel_is_not_loaded(tmp_path, shared):
    run(KERNEL, TMPDIR=shared)
    mark, source = tmp_path / "loaded", tmp_path / "planted.c"
    source.write_text("#include <stdio.h>\n" + PLANTED % mark)
    kernels = list(shared.glob("mlx/*/cpu/lib*.so"))
    for kernel in kernels:
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", kernel, source], check=True)
    # Without its functions MLX refuses the library, but only after its code ran.
    subprocess.run([sys.executable, "-c", KERNEL], env={**os.environ, "TMPDIR": str(shared)}, capture_output=True)
    assert kernels
    assert mark.exists(), "MLX itself still trusts the temporary folder"
    mark.unlink()

    run(OURS + KERNEL, TMPDIR=shared, XDG_CACHE_HOME=tmp_path / "cache")

    assert not mark.exists()
    folder = tmp_path / "cache" / "launch-pipeline" / "kernels"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert list(folder.rglob("mlx/*/cpu/lib*.so"))


@needs_compiler
def test_a_missing_temporary_folder_does_not_matter(tmp_path):
    run(OURS + KERNEL, TMPDIR=tmp_path / "missing", XDG_CACHE_HOME=tmp_path / "cache")


@pytest.mark.parametrize("fault", ["open", "linked", "replaceable", "not a folder"])
def test_a_folder_that_others_could_have_filled_is_not_used(tmp_path, shared, fault):
    cache = tmp_path / "cache"
    folder = cache / "launch-pipeline" / "kernels"
    folder.mkdir(parents=True, mode=0o700)
    if fault == "open":
        folder.chmod(0o777)
    elif fault == "replaceable":
        cache.chmod(0o777)
    else:
        folder.rmdir()
    if fault == "linked":
        folder.symlink_to(shared)
    elif fault == "not a folder":
        folder.touch()
    program = OURS + "import os; found = os.environ['TMPDIR']; print(found, oct(os.stat(found).st_mode))"

    used, mode = run(program, TMPDIR=shared, XDG_CACHE_HOME=cache).split()

    assert used not in (str(folder), str(shared))
    assert mode == "0o40700"
    assert not Path(used).exists(), "it ends with its process"


def test_a_private_temporary_folder_stays(tmp_path):
    (private := tmp_path / "mine").mkdir(mode=0o700)

    used = Path(run(OURS + "import os; print(os.environ['TMPDIR'])", TMPDIR=private).strip())

    assert private in (used, used.parent)


def test_temporary_files_of_python_stay_where_they_were(tmp_path, shared):
    program = OURS + "import tempfile; print(tempfile.gettempdir())"

    assert run(program, TMPDIR=shared, XDG_CACHE_HOME=tmp_path / "cache").strip() == str(shared)


def test_every_program_that_imports_mlx_imports_the_check():
    graph = grimp.build_graph(*PACKAGES, include_external_packages=True)

    def imported(module):
        """What `python -m` imports, packages around the module included."""
        parts = module.split(".")
        around = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
        return set(around).union(*map(graph.find_upstream_modules, around))

    with_mlx = {
        name: modules for name in graph.modules if _is_program(name) and {"mlx", "mlx_lm"} & (modules := imported(name))
    }
    unchecked = {
        name for name, modules in with_mlx.items() if not any(one.startswith("protocol.inference") for one in modules)
    }

    assert len(with_mlx) > 5
    # It runs in an environment without our packages and is given a folder.
    assert unchecked <= {"orchestrator.http.embedding_program"}


def _is_program(name):
    if name.partition(".")[0] not in PACKAGES:
        return False
    path = Path(__file__).parents[2].joinpath(*name.split("."))
    package = path / "__init__.py"
    file = package if package.is_file() else path.with_suffix(".py")
    return any(
        isinstance(node, ast.If) and "__name__ == '__main__'" in ast.unparse(node.test)
        for node in ast.parse(file.read_text()).body
    )
