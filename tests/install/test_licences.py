"""The licences of all packages that an installation brings, by their own metadata: none restricts who uses ours."""

import re
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from tomllib import loads

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
PERMISSIVE = re.compile(
    "MIT|BSD|Apache|ISC|PSF|MPL|Mozilla|Zlib|CC0|CNRI|WTFPL|HPND|Python Software Foundation", re.IGNORECASE
)


def licence(name: str) -> str:
    """The expression, else the first line of the text, else the classifiers."""
    about = distribution(name).metadata
    text = about["License-Expression"] or (about["License"] or "").strip().partition("\n")[0]
    return text or " ".join(kind for kind in about.get_all("Classifier", []) if kind.startswith("License"))


def installed(requirements: list[str]) -> set[str]:
    """Names of the packages that these bring here, those that they bring in turn included."""
    found: set[str] = set()
    waiting = [Requirement(each) for each in requirements]
    while waiting:
        needed = waiting.pop()
        name = canonicalize_name(needed.name)
        if name in found or not any(
            needed.marker is None or needed.marker.evaluate({"extra": extra}) for extra in (needed.extras or {""})
        ):
            continue
        try:
            inner = distribution(name).requires or []
        except PackageNotFoundError:
            continue
        found.add(name)
        parsed = map(Requirement, inner)
        waiting += [
            one
            for one in parsed
            if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in ("", *needed.extras))
        ]
    return found


def test_every_package_has_a_permissive_licence():
    names = installed(PROJECT["project"]["dependencies"])
    stated = {name: licence(name) for name in sorted(names)}

    assert len(stated) > 30
    refused = {
        name: text for name, text in stated.items() if not PERMISSIVE.search(text) or re.search(r"\bA?L?GPL", text)
    }
    assert not refused


def test_the_build_backend_is_pinned():
    assert all(str(Requirement(each).specifier).startswith("==") for each in PROJECT["build-system"]["requires"])
