"""Laws of the BLAS that MLX gets on a Linux processor: one that computes, ours first, and a user's own before it."""

import importlib.util
import os
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from orchestrator.machine.blas import library
from orchestrator.machine.blas.library import blas_environment, fast_blas

linux = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"),
    reason="NumPy's wheels for Linux on these processors bring OpenBLAS",
)
_PRODUCTS = """
import mlx.core as mx
import numpy as np
for seed in range(40):
    random = np.random.default_rng(seed)
    rows, columns, sums = (int(n) for n in random.integers(1, 90, 3))
    a, b = (random.normal(size=size).astype(np.float32) for size in ((rows, sums), (sums, columns)))
    left, right = (mx.array(np.ascontiguousarray(each.T)).T for each in (a, b))
    stacked = (mx.array(np.stack([a, a])) @ mx.array(b))[1]
    added = mx.addmm(mx.zeros((rows, columns)), mx.array(a), mx.array(b))
    for product in (mx.array(a) @ mx.array(b), mx.array(a) @ right, left @ mx.array(b), added, stacked):
        assert np.abs(np.array(product) - a.astype(np.float64) @ b.astype(np.float64)).max() < 1e-4
"""


@pytest.fixture(autouse=True)
def no_other_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a library of its system, on which nothing was tried before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(library, "_SYSTEM", ())
    for name in ("LD_PRELOAD", "LD_LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)
    library._tried.cache_clear()


@pytest.fixture
def versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """Of the two libraries, `packaged` and `system`; None: it does not load."""
    packaged, system = tmp_path / "packaged", tmp_path / "system"
    packaged.touch()
    system.touch()
    candidate = library._Candidate(packaged, "packaged", ("packaged",))
    monkeypatch.setattr(library, "_packaged", lambda: candidate)
    monkeypatch.setattr(library, "_SYSTEM", (str(system),))
    versions: dict[str, str | None] = {}
    monkeypatch.setattr(library, "_tried", lambda preloaded, *_: versions[Path(preloaded[1]).name])
    return versions


@linux
def test_the_package_index_brings_an_openblas():
    blas = fast_blas()

    assert blas is not None
    assert (blas.origin, blas.version.startswith("0.3.")) == ("NumPy's wheel", True)


@linux
def test_mlx_multiplies_with_it_and_right(tmp_path: Path):
    bindings = {"LD_DEBUG": "bindings", "LD_DEBUG_OUTPUT": str(tmp_path / "bindings")}
    environment = {**os.environ, **blas_environment(), **bindings, "OPENBLAS_NUM_THREADS": "2"}
    subprocess.run([sys.executable, "-c", _PRODUCTS], env=environment, check=True)
    lines = [line for file in tmp_path.glob("bindings.*") for line in file.read_text().splitlines()]

    assert any("libmlx.so" in line and "bridge-" in line and "`cblas_sgemm'" in line for line in lines)
    assert any("bridge-" in line and "libscipy_openblas64_" in line for line in lines)


@linux
def test_an_environment_whose_path_has_spaces_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    numpy = importlib.util.find_spec("numpy")
    assert numpy is not None
    assert numpy.origin is not None
    place = tmp_path / "my own" / "numpy"
    place.mkdir(parents=True)
    (place.parent / "numpy.libs").symlink_to(Path(numpy.origin).parents[1] / "numpy.libs")
    found = SimpleNamespace(origin=str(place / "__init__.py"))
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda _: found)

    blas = fast_blas()
    assert blas is not None
    assert f"{place.parent}/numpy.libs:" in blas.environment["LD_LIBRARY_PATH"]


@linux
def test_what_the_user_loads_is_kept_and_children_get_the_same(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libjemalloc.so")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/lib")
    environment = blas_environment()
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    assert environment["LD_PRELOAD"].endswith(" /usr/lib/libjemalloc.so")
    assert environment["LD_LIBRARY_PATH"].endswith(":/opt/lib")
    assert {**os.environ, **blas_environment()} == dict(os.environ)


@linux
def test_a_blas_that_the_user_preloads_stays(monkeypatch: pytest.MonkeyPatch):
    mlx = importlib.util.find_spec("mlx")
    assert mlx is not None
    [folder] = mlx.submodule_search_locations or []
    [own] = (Path(folder).parent / "mlx_cpu.libs").glob("libblas-*")
    monkeypatch.setenv("LD_PRELOAD", str(own))
    blas = fast_blas()

    assert blas is not None
    assert (str(blas), blas.environment) == (f"preloaded: {own}", {"LD_PRELOAD": str(own)})


@linux
def test_a_file_that_does_not_load_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    broken = tmp_path / "libblas.so.3"
    broken.write_bytes(b"\x7fELF")
    monkeypatch.setattr(library, "_packaged", lambda: None)
    monkeypatch.setattr(library, "_SYSTEM", (str(broken),))

    assert fast_blas() is None
    assert blas_environment() == {}


@pytest.mark.parametrize(
    ("packaged", "system", "taken"),
    [
        ("0.3.31.188.0", "0.3.21", "packaged"),
        ("0.3.31.188.0", "0.4.0", "packaged"),
        ("0.3.31.188.0", "", "packaged"),
        ("0.3.31.188.0", None, "packaged"),
        (None, "0.3.21", "system"),
        (None, None, None),
    ],
)
def test_the_systems_library_is_taken_if_ours_does_not_load(
    packaged: str | None, system: str | None, taken: str | None, versions: dict[str, str | None]
):
    versions |= {"packaged": packaged, "system": system}
    blas = fast_blas()

    assert (blas and Path(blas.origin).name) == taken


def test_a_library_is_tried_once_for_all_starts_and_again_if_it_is_replaced_or_has_failed(
    versions: dict[str, str | None], tmp_path: Path
):
    versions |= {"packaged": None, "system": None}
    assert fast_blas() is None
    versions["packaged"] = "0.3.31"
    fast_blas()
    versions["packaged"] = "0.3.34"
    assert str(fast_blas()) == "OpenBLAS 0.3.31 (packaged)"
    (tmp_path / "packaged").write_bytes(b"another")

    assert str(fast_blas()) == "OpenBLAS 0.3.34 (packaged)"


@pytest.mark.parametrize("record", [b"", b"[]", b'{"a": 1}', b"\xff", None])
def test_a_broken_record_is_as_good_as_none_and_a_cache_that_can_not_be_written_hinders_nothing(
    record: bytes | None, versions: dict[str, str | None], tmp_path: Path
):
    versions |= {"packaged": "0.3.31", "system": None}
    place = tmp_path / "cache" / "launch-pipeline" / "blas.json"
    if record is None:
        (tmp_path / "cache").touch()
    else:
        place.parent.mkdir(parents=True)
        place.write_bytes(record)

    assert str(fast_blas()) == "OpenBLAS 0.3.31 (packaged)"
