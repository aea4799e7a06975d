"""Rows that are called float32 are computed in float32: on an M5 and with CUDA MLX would multiply in TF32."""

import subprocess
import sys

import pytest

from orchestrator.lab import forwards
from orchestrator.lab.forwards import ForwardOrder, Precision, examined
from tests.support.paths import ROOT

NAME = "MLX_ENABLE_TF32"


@pytest.mark.parametrize(("precision", "expected"), [("float32", "0"), ("stored", None)])
def test_forwards_are_compared_so(precision: Precision, expected: str | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(forwards, "reports", lambda *_, variables, **__: iter([variables.get(NAME)]))

    assert [*examined(ForwardOrder(precision=precision))] == [expected]


def test_and_these_tests_before_mlx_is_imported():
    program = (
        "import sys, os, tests\n"
        f"print(os.environ[{NAME!r}], [name for name in sys.modules if name.partition('.')[0] == 'mlx'])"
    )
    told = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)

    assert told.stdout == "0 []\n"
