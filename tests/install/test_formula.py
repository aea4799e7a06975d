"""Laws of the Homebrew formula: it pins what the lock pins for a Mac, with the index's hashes, and fits each macOS.

The index is a stand-in.
"""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.paths import ROOT

_FOLDER = ROOT / "docs" / "install"
_LOCK = """\
# written by uv
alpha==1.0 \\
    --hash=sha256:1234
    # via launch-pipeline (pyproject.toml)
beta==2.0 ; sys_platform == 'darwin' \\
    --hash=sha256:5678 \\
    --hash=sha256:9abc
    # via
    #   alpha
    #   pytest
gamma==3.0 ; sys_platform == 'linux'
    # via alpha
pytest==9.0
    # via launch-pipeline (pyproject.toml)
"""
_PROJECT = {"dependencies": ["Alpha>=1"]}


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("homebrew_formula", _FOLDER / "formula.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Its classes look their module up.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


formula = _load()


def _file(name: str, digit: str) -> dict:
    return {"filename": name, "url": f"https://index/{name}", "hashes": {"sha256": digit * 64}}


_INDEX = {
    "alpha": [
        _file("alpha-1.0.tar.gz", "0"),
        _file("alpha-0.9-py3-none-any.whl", "1"),
        _file("alpha-1.0-py2.7-none-any", "2"),
        _file("alpha-1.0-py3-none-any.whl", "3"),
    ],
    "beta": [
        _file("beta-2.0-cp313-cp313-macosx_14_0_arm64.whl", "4"),
        _file("beta-2.0-cp313-cp313-macosx_26_0_arm64.whl", "5"),
        _file("beta-2.0-cp312-cp312-macosx_26_0_arm64.whl", "6"),
        _file("beta-2.0-cp313-cp313-manylinux_2_28_aarch64.whl", "7"),
    ],
}


def test_a_mac_gets_what_the_package_needs_and_nothing_of_development():
    assert [tuple(pin) for pin in formula.pins(_LOCK, _PROJECT)] == [("alpha", "1.0"), ("beta", "2.0")]


def _chosen() -> dict[str, dict]:
    return {pin.name: formula.wheels(pin, _INDEX.__getitem__) for pin in formula.pins(_LOCK, _PROJECT)}


def test_each_macos_gets_the_newest_wheel_that_fits():
    hashes = {name: [wheel.sha256[0] for wheel in each.values()] for name, each in _chosen().items()}

    assert list(formula.SYSTEMS) == ["sonoma :or_older", "sequoia", "tahoe :or_newer"]
    assert hashes == {"alpha": ["3", "3", "3"], "beta": ["4", "4", "5"]}


def test_a_released_wheel_is_where_the_index_keeps_such_content(tmp_path: Path):
    """The content that hashes to a known address: PyPI's addresses of other files have been compared with this rule."""
    file = tmp_path / "own-1.0-py3-none-any.whl"
    file.write_bytes(b"")

    wheel = formula.released(file)

    # BLAKE2b-256 and SHA-256 of nothing.
    place = "0e/57/51c026e543b2e8ab2eb06099daa1d1e5df47778f7787faab45cdf12fe3a8"
    assert wheel.url == f"https://files.pythonhosted.org/packages/{place}/own-1.0-py3-none-any.whl"
    assert wheel.sha256 == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


@pytest.mark.skipif(shutil.which("ruby") is None, reason="no ruby here to parse the formula with")
@pytest.mark.parametrize("own", [None, formula.Wheel("https://index/own.whl", "a" * 64)])
def test_the_formula_is_ruby(own: Any):
    text = formula.formula("1.2", _chosen(), own)

    assert subprocess.run(["ruby", "-c", "-"], input=text, text=True, capture_output=True).returncode == 0
