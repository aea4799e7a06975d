"""Laws of the Homebrew formula: it pins what the lock pins for a Mac, with the index's hashes, and fits each macOS.

The index is a stand-in; the formula that is kept was written from the real one.
"""

import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.paths import ROOT

_FOLDER = ROOT / "docs" / "install"
_KEPT = (_FOLDER / "launch-pipeline.rb").read_text()
_LOCK = """\
# written by uv
alpha==1.0
    # via launch-pipeline (pyproject.toml)
beta==2.0 ; sys_platform == 'darwin'
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


def test_each_macos_gets_the_newest_wheel_that_fits():
    chosen = {pin.name: formula.wheels(pin, _INDEX.__getitem__) for pin in formula.pins(_LOCK, _PROJECT)}

    text = formula.formula("1.2", chosen, formula.Wheel("https://index/own.whl", "a" * 64))

    systems = {
        system: re.findall(r'sha256 "(.)', block) for system, block in re.findall(r"on_(\w+)(.*?)\n  end", text, re.S)
    }
    assert systems == {"sonoma": ["4"], "sequoia": ["4"], "tahoe": ["5"]}
    assert re.findall(r'^  (?:  )?sha256 "(.)', text, re.MULTILINE)[:2] == ["a", "3"]
    assert 'url "https://index/own.whl", using: :nounzip\n  version "1.2"' in text


def test_a_released_wheel_is_where_the_index_keeps_such_content(tmp_path: Path):
    """The content that hashes to a known address: PyPI's addresses of other files have been compared with this rule."""
    file = tmp_path / "own-1.0-py3-none-any.whl"
    file.write_bytes(b"")

    wheel = formula.released(file)

    # BLAKE2b-256 and SHA-256 of nothing.
    place = "0e/57/51c026e543b2e8ab2eb06099daa1d1e5df47778f7787faab45cdf12fe3a8"
    assert wheel.url == f"https://files.pythonhosted.org/packages/{place}/own-1.0-py3-none-any.whl"
    assert wheel.sha256 == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def test_a_package_without_a_wheel_for_a_mac_is_named():
    with pytest.raises(ValueError, match=r"beta 1\.0 has no wheel for macOS 14"):
        formula.wheels(formula.Pin("beta", "1.0"), _INDEX.__getitem__)


def test_the_kept_formula_is_in_step_with_the_lock():
    """After a change of the lock: python docs/install/formula.py > docs/install/launch-pipeline.rb"""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {tuple(pin) for pin in formula.pins((ROOT / "requirements.lock").read_text(), project)}

    found = re.findall(r'resource "([^"]+)" do\n +url "\S+/[^/-]+-([^/-]+)-[^/]+\.whl"', _KEPT)

    assert set(found) == wanted
    assert f'version "{project["version"]}"' in _KEPT


def test_every_resource_of_the_kept_formula_is_pinned_by_its_hash():
    resources = re.findall(r'resource "[^"]+" do\n +url "([^"]+)", using: :nounzip\n +sha256 "([^"]+)"\n +end', _KEPT)

    assert len(resources) == _KEPT.count('resource "') > 50
    assert all(url.startswith("https://files.pythonhosted.org/packages/") for url, _ in resources)
    assert all(re.fullmatch(r"[0-9a-f]{64}", digest) for _, digest in resources)


@pytest.mark.skipif(shutil.which("ruby") is None, reason="no ruby here to parse the formula with")
def test_the_kept_formula_is_ruby():
    subprocess.run(["ruby", "-c", "-"], input=_KEPT, text=True, check=True, capture_output=True)
