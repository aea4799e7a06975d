"""Laws of recording: each text once, complete or absent, and a replayed bench is exact."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from orchestrator.cli.app import cli
from orchestrator.lab.bench.contender import BenchRequest
from orchestrator.lab.bench.plan import BenchPlan
from orchestrator.lab.bench.prompts import BenchPrompt
from orchestrator.lab.bench.strategies import distinct_tasks, recorded
from orchestrator.lab.bench.trials import requests_of
from orchestrator.lab.findings import Listener
from protocol.contracts.model_folder import ModelFolder
from protocol.errors import InputError
from protocol.paths import cache_folder
from protocol.worker.recorded_texts import RecordedTexts
from tests.support.bench_measurements import bench_plan
from tests.support.paths import DEMO_TARGET

_PROMPTS = [BenchPrompt("def quicksort(items):\n"), BenchPrompt("import os\n")]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("sys.platform", "linux")


def _plan(**changes) -> BenchPlan:
    words = {"draft_tokens": "2", "strategies": "ar,sd", "temperature": (0.0, 1.0), "max_tokens": 6}
    return bench_plan(**(words | {"pace": "h100-qwen3-32b", "replay": True} | changes))


def _requests() -> list[BenchRequest]:
    return requests_of(_PROMPTS, _plan(), Listener())


def test_a_text_at_temperature_0_is_recorded_once_for_all_repeats():
    tasks = distinct_tasks(_plan(), [BenchRequest((1, 2), 0), BenchRequest((3, 4), 1)])

    assert sorted((task.tokens, task.temperature, task.seed) for task in tasks) == [
        ((1, 2), 0.0, 0),
        ((1, 2), 1.0, 0),
        ((1, 2), 1.0, 1000),
        ((3, 4), 0.0, 0),
        ((3, 4), 1.0, 1),
        ((3, 4), 1.0, 1001),
    ]


def test_only_a_paced_plan_replays():
    assert _plan().replays
    assert not _plan(pace=None).replays


@pytest.mark.thorough
def test_texts_are_recorded_once_and_kept_by_target_and_requests():
    made: list[str] = []

    first = recorded(_plan(), _requests(), made.append)
    again = recorded(_plan(strategies="adaptive"), _requests(), made.append)
    longer = recorded(_plan(max_tokens=7), _requests(), made.append)

    assert first == again != longer
    assert len(made) == 2 * len(distinct_tasks(_plan(), _requests()))
    texts = RecordedTexts.read(first, ModelFolder(DEMO_TARGET).fingerprint).texts
    assert {len(text.tokens) for text in texts} == {6}


@pytest.mark.thorough
def test_a_recording_that_stops_leaves_no_texts_and_damaged_ones_are_refused_with_their_path():
    def stop(_: str) -> None:
        raise KeyboardInterrupt

    plan, requests = _plan(repeats=1), _requests()[:1]
    with pytest.raises(KeyboardInterrupt):
        recorded(plan, requests, stop)
    assert [path for path in (cache_folder() / "recorded-texts").iterdir() if path.suffix != ".lock"] == []

    path = recorded(plan, requests, lambda _: None)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match=r"texts\.jsonl can't be replayed .*: delete the file and record again"):
        recorded(plan, requests, lambda _: None)


@pytest.mark.thorough
def test_a_replayed_bench_is_exact():
    words = "bench --limit 1 --repeats 1 --max-tokens 6 --draft-tokens 2 --strategies ar,sd"

    result = CliRunner().invoke(
        cli, f"{words} --pace h100-qwen3-32b --replay --pair demo --json".split(), catch_exceptions=False
    )

    report = json.loads(result.stdout)
    assert result.exit_code == 0
    assert report["exact"] is True
    names = ["mlx-lm", "mlx-lm K=2", "plain (ar)", "sd K=2"]
    assert [row["contender"] for row in report["results"]] == names * 2
    assert all(row["overruns"] is not None for row in report["results"])
