"""Laws of a bench with rivals: a deviation is told and not a failure, and a rival that can't run has a reason."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from orchestrator.cli.app import cli
from orchestrator.lab.bench.contender import Family, TimedGeneration
from orchestrator.lab.bench.figures import BenchRow, rows
from orchestrator.lab.bench.measurement import Measurement, Setting
from orchestrator.lab.bench.plan import BenchPlan
from orchestrator.lab.bench.rivals import contenders
from orchestrator.lab.bench.rivals.contenders import RIVALS
from orchestrator.lab.bench.strategies import findings
from orchestrator.lab.findings import Findings
from protocol.errors import InputError
from tests.support.paths import ROOT
from tests.support.shown import complaints, shown

_NAME = "mlx-dspark"
_WORDS = (
    "bench --pair demo --limit 1 --repeats 1 --max-tokens 6 --draft-tokens 0 --strategies ar --temperature 0 --json"
)
_ORDER = ["mlx-lm", "ar", "mlx-dspark greedy"]


def _plan(**changes) -> BenchPlan:
    words = {"draft_tokens": "0", "strategies": "ar", "temperature": (0.0,), "rivals": _NAME}
    others = {"target": None, "draft": None, "repeats": 1, "max_tokens": 8, "controls": False}
    return BenchPlan.of(**(words | others | changes))


def _measured(contender: str, family: Family, tokens: tuple[int, ...], prompt: int) -> Measurement:
    generation = TimedGeneration(tokens=tokens, tokens_per_second=10.0, tokens_per_round=1.0)
    return Measurement(Setting(0, prompt, 0.0), contender, family, generation)


def _rows(rival_tokens: tuple[int, ...], ours: tuple[int, ...] = (1, 2)) -> list[BenchRow]:
    found = []
    for prompt, tokens in enumerate([(1, 2), rival_tokens]):
        found += [
            _measured("mlx-lm", "mlx-lm", (1, 2), prompt),
            _measured("ar", "coupled", ours, prompt),
            _measured("mlx-dspark greedy", "rival", tokens, prompt),
        ]
    return rows(found, _ORDER)


def _found(figures: list[BenchRow], **others) -> Findings:
    return findings(figures, _plan(), 1, **others)


def test_a_rivals_deviation_is_told_and_is_no_failure():
    figures = _rows(rival_tokens=(1, 3))

    found = _found(figures)
    assert complaints(found) == []
    assert found.figures["exact"] is True
    text = shown(found)
    assert "mlx-dspark greedy at temperature 0: 1 of 2 generations differ from the reference." in text
    assert "WRONG" not in text
    assert "1/2" in text


def test_our_own_deviation_stays_a_failure_beside_a_rival():
    figures = _rows(rival_tokens=(1, 2), ours=(9, 9))

    assert complaints(_found(figures)) == ["ar at temperature 0: 2 of 2 generations differ from the reference"]


def test_an_exact_rival_has_no_note_of_deviations():
    assert "differ from the reference" not in shown(_found(_rows(rival_tokens=(1, 2))))


def test_a_rival_that_cannot_run_is_named_with_the_reason_in_table_and_json():
    figures = _rows(rival_tokens=(1, 2))[:2]

    found = _found(figures, absent={_NAME: "no network"})
    assert "mlx-dspark is not in the table: no network." in shown(found)
    assert found.figures["absent_rivals"] == {_NAME: "no network"}


def test_an_unknown_rival_is_refused():
    with pytest.raises(InputError, match="choose from mlx-dspark"):
        _plan(rivals="vllm")


@pytest.mark.thorough
def test_a_bench_with_a_rival_measures_each_of_its_loops(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(RIVALS, _NAME, replace(RIVALS[_NAME], program=ROOT / "tests/support/fake_rival.py"))
    monkeypatch.setattr(contenders, "environment", lambda *_: Path(sys.executable))

    result = CliRunner().invoke(cli, [*_WORDS.split(), "--rivals", _NAME], catch_exceptions=False)

    found = json.loads(result.stdout)
    assert (result.exit_code, found["exact"], found["absent_rivals"]) == (0, True, {})
    names = [row["contender"] for row in found["results"] if row["rival"]]
    assert names == [loop.contender for loop in RIVALS[_NAME].loops]
    assert all(row["deviating"] == 1 for row in found["results"] if row["rival"])


@pytest.mark.thorough
def test_a_paced_bench_leaves_rivals_out_and_says_why():
    words = [*_WORDS.split(), "--rivals", _NAME, "--pace", "h100-qwen3-32b"]

    result = CliRunner().invoke(cli, words, catch_exceptions=False)

    found = json.loads(result.stdout)
    assert result.exit_code == 0
    assert found["absent_rivals"].keys() == {_NAME}
    assert "paced" in found["absent_rivals"][_NAME]
    assert not any(row["rival"] for row in found["results"])
