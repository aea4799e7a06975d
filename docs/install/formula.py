"""Writes the Homebrew formula to standard output: what requirements.lock pins, with the index's files and hashes.

    python docs/install/formula.py                                                       # without a release
    python docs/install/formula.py --wheel dist/launch_pipeline-0.1.0-py3-none-any.whl   # with a release's own hash

The formula is for a tap. It installs wheels: mlx-metal and coremltools are published as nothing else, and others would
need a Rust compiler. Homebrew's own helper for Python keeps only wheels for every system as they are and unpacks the
rest (Library/Homebrew/language/python.rb, pip_install), so the formula calls pip itself.
"""

import argparse
import hashlib
import json
import os
import re
import sys
import tomllib
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from packaging.requirements import Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags, mac_platforms
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).parents[2]
PYTHON = (3, 13)
"""The newest for which coremltools has wheels."""
SYSTEMS = {"sonoma :or_older": 14, "sequoia": 15, "tahoe :or_newer": 26}
"""Homebrew's names of the versions of macOS for which some package has a wheel of its own."""
_MAC = {
    "implementation_name": "cpython",
    "os_name": "posix",
    "platform_machine": "arm64",
    "platform_python_implementation": "CPython",
    "platform_system": "Darwin",
    "python_full_version": f"{PYTHON[0]}.{PYTHON[1]}.0",
    "python_version": f"{PYTHON[0]}.{PYTHON[1]}",
    "sys_platform": "darwin",
    "extra": "",
}
_ACCEPT = "application/vnd.pypi.simple.v1+json"


class Pin(NamedTuple):
    name: str
    version: str


class Wheel(NamedTuple):
    url: str
    sha256: str


Index = Callable[[str], list[Mapping[str, Any]]]
"""The files of a package, as the index tells them (PEP 691)."""


def pins(lock: str, project: Mapping[str, Any]) -> list[Pin]:
    """What a Mac needs to run the package: the lock's pins without those that only development needs.

    The lock names below each pin what needs it ("via"), as `uv pip compile` writes it.
    """
    found = {pin.name: (pin, parents) for pin, parents in _entries(lock)}
    direct = {canonicalize_name(Requirement(line).name) for line in project["dependencies"]}
    needed: set[str] = set()
    while grown := {
        name
        for name, (_, parents) in found.items()
        if name not in needed and ((name in direct and "launch-pipeline" in parents) or parents & needed)
    }:
        needed |= grown
    return sorted(pin for name, (pin, _) in found.items() if name in needed)


def wheels(pin: Pin, index: Index) -> dict[str, Wheel]:
    """The best wheel of a pin for each of SYSTEMS. Raises ValueError if one has none."""
    ours = [file for file in index(pin.name) if re.match(rf"[^-]+-{re.escape(pin.version)}-.+\.whl$", file["filename"])]
    best = {}
    for system, major in SYSTEMS.items():
        ranks = {tag: rank for rank, tag in enumerate(_tags(major))}
        fitting = [(rank, file) for file in ours if (rank := _rank(file["filename"], ranks)) is not None]
        if not fitting:
            raise ValueError(f"{pin.name} {pin.version} has no wheel for macOS {major} on arm64 and Python {PYTHON}")
        file = min(fitting, key=lambda ranked: ranked[0])[1]
        best[system] = Wheel(file["url"], file["hashes"]["sha256"])
    return best


def released(file: Path) -> Wheel:
    """Where the index will have the file. It keeps each under the BLAKE2b hash of its content, 32 bytes long."""
    content = file.read_bytes()
    place = hashlib.blake2b(content, digest_size=32).hexdigest()
    url = f"https://files.pythonhosted.org/packages/{place[:2]}/{place[2:4]}/{place[4:]}/{file.name}"
    return Wheel(url, hashlib.sha256(content).hexdigest())


def formula(version: str, chosen: Mapping[str, Mapping[str, Wheel]], own: Wheel | None) -> str:
    """The text. `chosen`: wheels of each package by system. `own`: the released wheel; None before a release."""
    common = {name: next(iter(each.values())) for name, each in chosen.items() if len(set(each.values())) == 1}
    special = {
        system: {name: each[system] for name, each in chosen.items() if name not in common} for system in SYSTEMS
    }
    python = f"python@{PYTHON[0]}.{PYTHON[1]}"
    lines = [
        "# Written by docs/install/formula.py from requirements.lock.",
        "class LaunchPipeline < Formula",
        '  desc "Speculative decoding with draft and target at work at the same time"',
        '  homepage "https://pypi.org/project/launch-pipeline/"',
        f'  url "{own.url}", using: :nounzip' if own else "  # The release workflow adds the wheel's url and sha256.",
        f'  version "{version}"',
        *([f'  sha256 "{own.sha256}"'] if own else []),
        '  license all_of: ["MIT", "Apache-2.0"]',
        "",
        "  depends_on arch: :arm64",
        "  depends_on macos: :sonoma",
        f'  depends_on "{python}"',
        "",
        *(line for name in sorted(common) for line in _resource(name, common[name], "  ")),
    ]
    for system, each in special.items():
        if each:
            blocks = [line for name in sorted(each) for line in _resource(name, each[name], "    ")]
            lines += [f"  on_{system} do", *blocks[:-1], "  end", ""]
    return "\n".join([*lines, *_INSTALL.replace("PYTHON", python.replace("@", "")).splitlines(), "end", ""])


# Wheels are installed in post_install: Homebrew writes new paths into the libraries that `install` leaves, and those
# that were linked elsewhere may have no room for them in their headers.
_INSTALL = """  def install
    system "PYTHON", "-m", "venv", "--without-pip", libexec
    resources.each { |resource| resource.stage libexec/"wheels" }
    (libexec/"wheels").install Dir["*.whl"]
    bin.write_exec_script opt_libexec/"bin/launch-pipeline"
  end

  def post_install
    wheels = Dir[libexec/"wheels/*.whl"]
    return if wheels.empty?

    # macOS 26 calls itself 16.0 to some Pythons otherwise, and its wheels would not fit.
    ENV["SYSTEM_VERSION_COMPAT"] = "0"
    system "PYTHON", "-m", "pip", "--python=#{libexec}/bin/python", "install", "--no-index", "--no-deps", *wheels
    rm_r libexec/"wheels"
  end

  test do
    assert_match version.to_s, shell_output("#{bin}/launch-pipeline --version")
  end"""


def _entries(lock: str) -> Iterator[tuple[Pin, set[str]]]:
    """Each pin that a Mac takes, and the packages that need it."""
    for block in re.split(r"\n(?=[A-Za-z0-9])", lock):
        first, *rest = block.splitlines()
        if not first or first.startswith("#"):
            continue
        pin = Requirement(first.rstrip(" \\"))
        if pin.marker is None or pin.marker.evaluate(_MAC):
            comments = " ".join(line for line in rest if line.lstrip().startswith("#"))
            words = re.findall(r"[A-Za-z0-9][\w.-]*", comments.replace("# via", ""))
            version = next(iter(pin.specifier)).version
            yield Pin(canonicalize_name(pin.name), version), {canonicalize_name(word) for word in words}


def _tags(major: int) -> Iterable[Tag]:
    """Of that macOS on Apple silicon and this Python, the most special first."""
    platforms = list(mac_platforms((major, 0), "arm64"))
    yield from cpython_tags(PYTHON, platforms=platforms)
    yield from compatible_tags(PYTHON, f"cp{PYTHON[0]}{PYTHON[1]}", platforms)


def _rank(filename: str, ranks: Mapping[Tag, int]) -> int | None:
    """The best rank of a wheel's tags; None if none is among them."""
    tags = parse_wheel_filename(filename)[3]
    return min((ranks[tag] for tag in tags if tag in ranks), default=None)


def _resource(name: str, wheel: Wheel, margin: str) -> list[str]:
    lines = [
        f'resource "{name}" do',
        f'  url "{wheel.url}", using: :nounzip',
        f'  sha256 "{wheel.sha256}"',
        "end",
    ]
    return [*(margin + line for line in lines), ""]


def _ask(name: str) -> list[Mapping[str, Any]]:
    """The package index that pip is configured for by PIP_INDEX_URL, or PyPI."""
    base = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/")
    request = urllib.request.Request(f"{base}/{name}/", headers={"Accept": _ACCEPT})  # noqa: S310 - the maintainer's
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310 - own setting names the scheme
        return json.load(answer)["files"]


def main(arguments: list[str]) -> str:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--wheel", type=Path, help="the released wheel, whose hash is written")
    wheel: Path | None = parser.parse_args(arguments).wheel
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = pins((ROOT / "requirements.lock").read_text(), project)
    own = released(wheel) if wheel else None
    return formula(project["version"], {pin.name: wheels(pin, _ask) for pin in needed}, own)


if __name__ == "__main__":
    sys.stdout.write(main(sys.argv[1:]))
