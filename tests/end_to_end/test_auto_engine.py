"""`--draft-engine auto` where there is a Neural Engine: the executor stands for it, and all processes are real."""

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from orchestrator import Pipeline, SamplingParams
from orchestrator.machine.drafts import draft_choice
from orchestrator.machine.drafts.auto_draft import AutoDraft, place_of
from orchestrator.machine.drafts.converted_draft import conversion_of, converted_draft
from orchestrator.machine.profiles.device_profiles import load_profile
from orchestrator.runtime.notices import Notice, NoticeKind
from protocol.contracts.coreml import FOLDER_MODEL, EngineRates, EngineVerdict, record, recorded
from tests.conftest import Reference
from tests.support.models.coreml_programs import converted_demo
from tests.support.paths import DEMO_DRAFT, DEMO_TARGET
from tests.support.processes import mark, members, remains, started_with, until

PROMPT = "def quicksort(items):"
PROMPTS = [PROMPT, "import os\n", "class Stack:\n", "for i in range(10):\n", "def main():\n", "x = [1, 2, 3]\n"]
LONG = SamplingParams(max_tokens=40)
SHORT = SamplingParams(max_tokens=8)
EXAMINER = (sys.executable, "-m", "tests.support.fake_examiner")
BLIND = (sys.executable, "-m", "tests.support.chaotic_draft", "random")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with a Neural Engine, and its empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(draft_choice, "neural_engine", lambda: "executor")
    return tmp_path


class Told(list[Notice]):
    """What the pipeline tells its user."""

    def texts(self, kind: NoticeKind) -> list[str]:
        return [notice.text for notice in self if notice.kind == kind]


@pytest.fixture
def told() -> Told:
    return Told()


def opened(told: Told, draft: Path = DEMO_DRAFT, **setup: Any) -> Pipeline:
    """With the demo target, and the fake examiner: it is honest unless FAKE_DEVICE says otherwise."""
    # Guesses by prompt lookup would hide the difference between two drafts.
    pipeline = Pipeline(str(DEMO_TARGET), str(draft), lookup="off", draft_width=8, on_notice=told.append)
    auto = msgspec.structs.replace(automatic(pipeline), examiner=setup.pop("examiner", EXAMINER), predicts=3)
    pipeline._setup = msgspec.structs.replace(pipeline._setup, auto=auto, **setup)
    return pipeline


def automatic(pipeline: Pipeline) -> AutoDraft:
    assert pipeline._setup.auto is not None
    return pipeline._setup.auto


def converted_before(damaged: bool = False) -> Path:
    """The demo draft's conversion, with few slots: the executor's time grows with them. It was examined before."""
    folder = conversion_of(DEMO_DRAFT)
    shutil.copytree(converted_demo(), folder)
    if damaged:
        (weights,) = (folder / FOLDER_MODEL).rglob("weight.bin")
        weights.write_bytes(weights.read_bytes()[:1000])
    record(EngineVerdict(place=place_of(folder), choice="coreml", reason="examined"))
    return folder


def slow_target() -> dict[str, Any]:
    """A forward takes 100 ms whatever its width: guesses come in time, and any accepted one pays."""
    profile = load_profile("m4-16gb-qwen2.5-3b")
    step = profile.target.steps[0]
    slow, fast = (msgspec.structs.replace(step, milliseconds=milliseconds) for milliseconds in (100.0, 1.0))
    target = msgspec.structs.replace(profile.target, steps=(slow,))
    draft = msgspec.structs.replace(profile.draft, steps=(fast,))
    return {"pace": msgspec.structs.replace(profile, target=target, draft=draft)}


# Success -------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_the_winner_of_a_trial_in_mid_request_stays_and_the_next_start_uses_it_at_once(
    told: Told, reference: Reference
):
    """Core ML wins against guesses at random, unless this machine is so busy that its own guesses come too late."""
    converted_before()
    with opened(told, draft_command=BLIND, **slow_target()) as pipeline:
        name, auto = mark(pipeline), automatic(pipeline)
        until(lambda: told.texts("told"))
        both = members(name)
        # Rounds of several requests share a forward, so that the trial takes less time. The better the guesses, the
        # fewer rounds a request has.
        prompts, results = [], []
        while len(told.texts("told")) < 2:
            assert len(results) < 10 * len(PROMPTS), "the trial has no outcome"
            prompts += PROMPTS
            results += pipeline.generate(PROMPTS, LONG)
        loser = both["chaotic_draft" if "on the Neural Engine from now on" in told[-1].text else "draft_worker"]
        until(lambda: not Path(f"/proc/{loser}").exists())
        assert pipeline.state().lost == 0
    verdict = auto.verdict()

    assert remains(name) == []
    assert [result.tokens for result in results] == [reference(prompt, LONG).tokens for prompt in prompts]
    assert verdict is not None
    assert verdict.reason in told.texts("told")[1]
    assert told.texts("warning") == []
    with Pipeline(str(DEMO_TARGET), str(DEMO_DRAFT)) as again:
        assert again._setup.draft_engine == verdict.choice
        assert verdict.reason in again.note
        assert again.generate(PROMPT, SHORT).tokens == reference(PROMPT, SHORT).tokens


@pytest.mark.thorough
def test_the_draft_is_converted_and_examined_while_mlx_drafts(home: Path, told: Told, reference: Reference):
    executor = AutoDraft.__struct_defaults__[1]
    with opened(told, examiner=executor) as pipeline:
        assert pipeline.generate(PROMPT, SHORT).tokens == reference(PROMPT, SHORT).tokens
        package = automatic(pipeline).package
        until(lambda: told.texts("told"), seconds=240)
    told_of = " ".join(told.texts("progress"))
    verdict = recorded(place_of(package))

    assert told.texts("told") == ["The draft runs in MLX and, on trial, on the Neural Engine."]
    assert "Preparing the draft for the Neural Engine: converting for Core ML: graph" in told_of
    assert "Preparing the draft for the Neural Engine: examining: the executor's logits" in told_of
    assert verdict is not None
    assert verdict.choice == "coreml"
    until(lambda: not started_with(f"XDG_CACHE_HOME={home}"))


# Failures ------------------------------------------------------------------------------------------


def served_in_mlx(pipeline: Pipeline, told: Told, reference: Reference) -> str:
    """The warning of a pipeline whose draft can't use the Neural Engine, and that works nevertheless."""
    with pipeline:
        name = mark(pipeline)
        until(lambda: told.texts("warning"), seconds=60)
        assert pipeline.generate(PROMPT, SHORT).tokens == reference(PROMPT, SHORT).tokens
        assert pipeline.state().down == ()
        assert pipeline.state().lost == 0
    assert remains(name) == []
    (warning,) = told.texts("warning")
    assert "in MLX" in warning
    return warning


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("behaviour", "words", "lasts"),
    [("raising", "the compiler has had enough", True), ("crashing", "ended by signal 11", False)],
)
def test_a_draft_that_fails_its_examination_stays_in_mlx(
    behaviour: str, words: str, lasts: bool, told: Told, reference: Reference, monkeypatch: pytest.MonkeyPatch
):
    shutil.copytree(converted_demo(), conversion_of(DEMO_DRAFT))
    monkeypatch.setenv("FAKE_DEVICE", behaviour)

    assert words in served_in_mlx(opened(told), told, reference)
    assert (Pipeline(str(DEMO_TARGET), str(DEMO_DRAFT))._setup.auto is None) == lasts


@pytest.mark.thorough
@pytest.mark.parametrize("won", [False, True])
def test_a_core_ml_worker_that_dies_on_load_is_given_up_at_once(won: bool, told: Told, reference: Reference):
    """A later start tries again unless Core ML had won a trial: the file may be whole then."""
    converted_before(damaged=True)
    if won:
        auto = automatic(Pipeline(str(DEMO_TARGET), str(DEMO_DRAFT)))
        auto.record_trial("coreml", "it was faster", EngineRates(coreml=40.0, mlx=30.0))
    pipeline = opened(told)

    assert (pipeline._setup.draft_engine == "coreml") == won
    assert "weight.bin is truncated" in served_in_mlx(pipeline, told, reference)
    assert won or Pipeline(str(DEMO_TARGET), str(DEMO_DRAFT))._setup.auto is not None


# The end of a pipeline -----------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("killed", [False, True], ids=["closed", "killed"])
def test_the_end_of_the_pipeline_ends_a_conversion_and_leaves_nothing_of_it(home: Path, told: Told, killed: bool):
    """A conversion that was complete when it was asked to end stays, and serves the next start."""
    pipeline = opened(told)
    with pipeline:
        name = mark(pipeline)
        until(lambda: told.texts("progress"), seconds=60)
        if killed:
            os.kill(members(name)["orchestrator"], signal.SIGKILL)
    until(lambda: not started_with(f"XDG_CACHE_HOME={home}"))

    left = [entry for entry in (home / "launch-pipeline" / "converted").iterdir() if entry.is_dir()]
    assert left == [] or left == [converted_draft(str(DEMO_DRAFT))]
    assert remains(name) == []
