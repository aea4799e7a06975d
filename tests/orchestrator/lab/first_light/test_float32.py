"""Rows that are called float32 are computed in float32: on an M5 and with CUDA MLX would multiply in TF32."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.lab import forwards
from orchestrator.lab.first_light.measurements import exactness
from orchestrator.lab.first_light.stages import Asked, LightSettings
from orchestrator.lab.forwards import ForwardOrder, Precision, examined
from tests.support.paths import ROOT

NAME = "MLX_ENABLE_TF32"


@pytest.mark.parametrize(("precision", "expected"), [("float32", "0"), ("stored", None)])
def test_forwards_are_compared_so(precision: Precision, expected: str | None, monkeypatch: pytest.MonkeyPatch):
    given: list[Any] = []

    def reports(*_: object, variables: dict[str, str], **__: object) -> Iterator[None]:
        given.append(variables.get(NAME))
        return iter(())

    monkeypatch.setattr(forwards, "reports", reports)

    assert [*examined(ForwardOrder(precision=precision))] == []
    assert given == [expected]


def test_and_texts_are_decoded_so(monkeypatch: pytest.MonkeyPatch):
    """The weights as they are stored keep the user's setting, which is left as it was."""
    monkeypatch.delenv(NAME)
    seen: dict[str, set[str | None]] = {}

    class Pipeline:
        def __init__(self, settings: Any, **_: object) -> None:
            seen.setdefault(str(settings.target), set()).add(os.environ.get(NAME))

        def __enter__(self) -> "Pipeline":
            return self

        def __exit__(self, *_: object) -> None: ...

    @contextmanager
    def copied(_: Path) -> Iterator[Path]:
        yield Path("float32")

    monkeypatch.setattr(exactness, "Pipeline", Pipeline)
    monkeypatch.setattr(exactness, "float32_copy", copied)
    monkeypatch.setattr(exactness, "computes_on_gpu", lambda: True)
    monkeypatch.setattr(
        exactness, "PipelineContender", lambda *_: SimpleNamespace(generate=lambda _: SimpleNamespace(tokens=(1,)))
    )
    exactness.measure(Asked(LightSettings(short=True), lambda _: None, lambda _: None))

    (stored,) = (values for target, values in seen.items() if target != "float32")
    assert (stored, seen["float32"], os.environ.get(NAME)) == ({None}, {"0"}, None)


def test_and_these_tests_before_mlx_is_imported():
    program = (
        "import sys, os, tests\n"
        f"print(os.environ[{NAME!r}], [name for name in sys.modules if name.partition('.')[0] == 'mlx'])"
    )
    told = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)

    assert told.stdout == "0 []\n"
