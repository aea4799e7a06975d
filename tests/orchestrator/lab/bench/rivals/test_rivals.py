"""Laws of rivals: they run in a process of their own, their figures mean what everyone's mean, and one that can't run
is named."""

import ast
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.lab.bench.contender import GenerationTask
from orchestrator.lab.bench.names import line_and_draft_tokens
from orchestrator.lab.bench.rivals import contenders as module
from orchestrator.lab.bench.rivals.contenders import RIVALS, RivalContender, open_rivals, parse_rivals
from orchestrator.machine.downloads.environment import PYTHON, environment_folder
from orchestrator.machine.downloads.package_index import Unavailable
from orchestrator.machine.models.checkpoints import demo_model
from protocol.errors import InputError, PipelineError
from tests.support.paths import ROOT

_NAME = "mlx-dspark"
_TASK = GenerationTask((7, 8), 5, 0.0, 0)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that needs nothing stands for the rival's."""
    monkeypatch.setitem(RIVALS, _NAME, replace(RIVALS[_NAME], program=ROOT / "tests/support/fake_rival.py"))
    monkeypatch.setattr(module, "environment", lambda *_: Path(sys.executable))


def _opened(stack: ExitStack, absent: dict[str, str], tmp_path: Path) -> list[RivalContender]:
    return open_rivals((_NAME,), str(tmp_path), [0], stack, lambda _: None, absent.__setitem__)


def test_a_rival_adds_a_contender_for_each_of_its_loops(fake: None, tmp_path: Path):
    absent: dict[str, str] = {}
    with ExitStack() as stack:
        names = [contender.name for contender in _opened(stack, absent, tmp_path)]

    assert absent == {}
    assert names[0] == "mlx-dspark greedy"
    lines = [line_and_draft_tokens(name) for name in names[1:]]
    assert lines == [(line, k) for line in ("mlx-dspark lookup", "mlx-dspark lookup, bigrams") for k in (3, 6, 12)]


def test_a_token_beyond_those_asked_for_counts_for_the_speed_and_is_not_compared(fake: None, tmp_path: Path):
    with ExitStack() as stack:
        greedy, *_ = _opened(stack, {}, tmp_path)
        generation = greedy.generate(_TASK)

    assert generation.tokens == (1, 2, 3, 4, 5)
    assert generation.tokens_per_second == pytest.approx(10.0)
    assert (generation.tokens_per_round, generation.acceptance_rate) == (1.0, None)


def test_the_first_rejected_token_of_a_round_is_the_last_that_counts_as_verified(fake: None, tmp_path: Path):
    with ExitStack() as stack:
        _, lookup, *_ = _opened(stack, {}, tmp_path)
        generation = lookup.generate(_TASK)

    assert generation.acceptance_rate == pytest.approx(2 / 3)
    assert generation.tokens_per_round == 3.0


def test_times_start_with_the_request(fake: None, tmp_path: Path):
    with ExitStack() as stack:
        generation = _opened(stack, {}, tmp_path)[0].generate(_TASK)

    assert generation.time_to_first_token == generation.arrivals[0] == 0.5
    assert generation.total_time == generation.arrivals[-1] == 1.0


def test_a_rival_without_an_environment_is_named_with_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def offline(*_: object) -> Path:
        raise Unavailable("pip says: no route")

    monkeypatch.setattr(module, "environment", offline)
    absent: dict[str, str] = {}
    with ExitStack() as stack:
        assert _opened(stack, absent, tmp_path) == []

    assert absent == {_NAME: "pip says: no route"}


def test_a_rival_that_cannot_load_the_target_is_named_with_its_last_line(
    fake: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("FAKE_RIVAL", "load")
    absent: dict[str, str] = {}
    with ExitStack() as stack:
        assert _opened(stack, absent, tmp_path) == []

    assert absent == {_NAME: f"the process of mlx-dspark ended; its last line: no model in {tmp_path}"}


def test_a_rival_that_ends_in_a_job_is_an_error_with_its_last_line(
    fake: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("FAKE_RIVAL", "job")
    with ExitStack() as stack:
        greedy, *_ = _opened(stack, {}, tmp_path)
        with pytest.raises(PipelineError, match="its last line: out of memory"):
            greedy.generate(_TASK)


def test_a_rival_that_hangs_is_given_up(fake: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(module, "JOB_SECONDS", 0.3)
    monkeypatch.setenv("FAKE_RIVAL", "hang in job")
    absent: dict[str, str] = {}
    with ExitStack() as stack:
        greedy, *_ = _opened(stack, absent, tmp_path)
        with pytest.raises(PipelineError, match="the process of mlx-dspark gave no answer"):
            greedy.generate(_TASK)

    monkeypatch.setattr(module, "LOADING_SECONDS", 0.3)
    monkeypatch.setenv("FAKE_RIVAL", "hang")
    with ExitStack() as stack:
        assert _opened(stack, absent, tmp_path) == []

    assert absent[_NAME].startswith("the process of mlx-dspark gave no answer")


def test_no_process_is_left(fake: None, tmp_path: Path):
    with ExitStack() as stack:
        process = _opened(stack, {}, tmp_path)[0]._process._process

    assert not process.running


@pytest.mark.parametrize("words", ["", " , ", "vllm", "mlx-dspark,vllm"])
def test_an_unknown_rival_is_refused_with_the_list(words: str):
    with pytest.raises(InputError, match=r"There is no rival .*: choose from mlx-dspark, llama.cpp\."):
        parse_rivals(words)


def test_rivals_are_named_once_each():
    assert parse_rivals("mlx-dspark, mlx-dspark") == (_NAME,)
    assert parse_rivals(None) == ()


def test_the_environment_has_the_versions_that_the_bench_runs():
    pins = RIVALS[_NAME].pins()

    assert pins["mlx-dspark"] == "0.20.3"
    assert {"mlx", "mlx-lm"} <= pins.keys()


def test_the_program_imports_nothing_of_ours():
    tree = ast.parse(RIVALS[_NAME].program.read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}

    packages = {name.partition(".")[0] for name in names}
    assert packages - set(sys.stdlib_module_names) == {"mlx", "mlx_dspark", "mlx_lm"}


@pytest.mark.slow
def test_the_real_rival_continues_a_prompt_exactly(tmp_path: Path):
    rival = RIVALS[_NAME]
    if not (environment_folder(_NAME, rival.pins()) / PYTHON).exists():
        pytest.skip("its environment does not exist: `bench --rivals mlx-dspark` makes it")
    absent: dict[str, str] = {}
    with ExitStack() as stack:
        found = open_rivals((_NAME,), str(demo_model("target")), [0], stack, lambda _: None, absent.__setitem__)
        task = GenerationTask(tuple(range(40, 60)), 32, 0.0, 0)
        generations = [contender.generate(task) for contender in found]

    assert absent == {}
    assert len({generation.tokens for generation in generations}) == 1
    assert all(len(generation.tokens) == 32 for generation in generations)
