"""A process and its children may open as many files as the system allows, up to macOS's most."""

import resource
import subprocess
import sys

import pytest

from protocol.descriptors import raise_descriptor_limit

WANTED = 10_240
NOFILE, UNLIMITED = resource.RLIMIT_NOFILE, resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "raised"),
    [
        (256, UNLIMITED, (WANTED, UNLIMITED)),
        (256, 4096, (4096, 4096)),
        (256, 1 << 20, (WANTED, 1 << 20)),
        (WANTED, UNLIMITED, None),
        (1 << 16, 1 << 20, None),
        (UNLIMITED, UNLIMITED, None),
    ],
)
def test_the_soft_limit_is_raised_to_the_most_that_macos_takes_and_never_lowered(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, raised: tuple[int, int] | None
):
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: given.append(limits))

    raise_descriptor_limit()

    assert given == ([] if raised is None else [raised])


def test_a_system_that_refuses_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch):
    asked: list[object] = []

    def refused(_: int, limits: object) -> None:
        asked.append(limits)
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, UNLIMITED))
    monkeypatch.setattr(resource, "setrlimit", refused)

    raise_descriptor_limit()

    assert len(asked) == 1


def test_children_inherit_the_limit():
    program = """
import resource, subprocess, sys
from protocol.descriptors import raise_descriptor_limit
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
raise_descriptor_limit()
asked = "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
subprocess.run([sys.executable, "-c", asked])
"""
    hard = resource.getrlimit(NOFILE)[1]
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert int(told.stdout) == (WANTED if hard == UNLIMITED else min(WANTED, hard))
