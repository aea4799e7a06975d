"""Rows that are called float32 are computed in float32: on an M5 and with CUDA MLX would multiply in TF32."""

import os
import subprocess
import sys
from contextlib import nullcontext

import pytest

from orchestrator.lab import forwards
from orchestrator.lab.bench.plan import BenchPlan
from orchestrator.lab.findings import Findings
from orchestrator.lab.first_light import pipelines
from orchestrator.lab.first_light.stages import Asked, LightSettings
from orchestrator.lab.forwards import ForwardOrder, Precision, examined
from orchestrator.machine.check import Check
from tests.support.paths import ROOT

NAME = "MLX_ENABLE_TF32"


@pytest.mark.parametrize(("precision", "expected"), [("float32", "0"), ("stored", None)])
def test_forwards_are_compared_so(precision: Precision, expected: str | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(forwards, "reports", lambda *_, variables, **__: iter([variables.get(NAME)]))

    assert [*examined(ForwardOrder(precision=precision))] == [expected]


def test_and_texts_are_decoded_so(monkeypatch: pytest.MonkeyPatch):
    """The weights as they are stored keep the user's setting, which is left as it was."""
    monkeypatch.delenv(NAME)
    seen: list[tuple[str | None, str | None]] = []

    def measured(plan: BenchPlan, *_: object) -> Findings:
        seen.append((plan.target, os.environ.get(NAME)))
        return Findings(checks=(Check("ssd", "ok", "4 generations compared, all equal"),))

    monkeypatch.setattr(pipelines.strategies, "measure", measured)
    monkeypatch.setattr(pipelines, "float32_copy", nullcontext)
    monkeypatch.setattr(pipelines, "computes_on_gpu", lambda: True)
    found = pipelines.exactness(Asked(LightSettings(short=True), lambda _: None))

    assert [(target is None, value) for target, value in seen] == [(True, None), (False, "0")]
    assert os.environ.get(NAME) is None
    assert [check.name for check in found.checks] == ["as stored, ssd", "float32, ssd"]


def test_and_these_tests_before_mlx_is_imported():
    program = (
        "import sys, os, tests\n"
        f"print(os.environ[{NAME!r}], [name for name in sys.modules if name.partition('.')[0] == 'mlx'])"
    )
    told = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)

    assert told.stdout == "0 []\n"
