"""Laws of a first light's run: what is measured is kept, what fails is told, and the rest goes on."""

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
from typing import Any

import msgspec
import pytest

from orchestrator.lab.findings import Answer, Findings, Value
from orchestrator.lab.first_light import stage_process
from orchestrator.lab.first_light.folder import REPORT, LightFolder
from orchestrator.lab.first_light.redaction import Redactor
from orchestrator.lab.first_light.report import LightReport, Run, StageReport, page
from orchestrator.lab.first_light.run import Choice, lacking, run
from orchestrator.lab.first_light.stage_process import RanStage, measurement, run_stage
from orchestrator.lab.first_light.stages import (
    QUESTIONS,
    STAGES,
    LightSettings,
    OnNotice,
    Question,
    Stage,
    StageScreen,
    has_neural_engine,
)
from orchestrator.machine.conditions import Conditions
from protocol.errors import InputError
from tests.support.paths import ROOT
from tests.support.processes import running

THREE = [Stage(name, "", name.upper(), 10, 20) for name in ("one", "two", "three")]
NAMES = [stage.name for stage in THREE]
ASKED = [
    Question("seven", "one", "How many?"),
    Question("eight", "two", "And?"),
    Question("conditions", "two", "When?"),
]
HOUR = Choice(60)
ONE = Run(program="p 1", machine=("chip",), options=("short: False",), began="now")


class Runner:
    """Runs stages on a clock of its own: each takes its estimate. `fails`: the reason of a stage by name."""

    def __init__(self, *, interrupted: str = "", late: str = "", **fails: str) -> None:
        self.now = 0.0
        self.ran: list[tuple[str, float]] = []
        self._interrupted, self._late, self._fails = interrupted, late, fails | ({late: "it was late"} if late else {})

    def __call__(self, stage: Stage, settings: LightSettings, seconds: float, notice: OnNotice, /) -> RanStage:
        if stage.name == self._interrupted:
            raise KeyboardInterrupt
        self.ran.append((stage.name, seconds))
        self.now += 60 * stage.minutes
        if reason := self._fails.get(stage.name):
            failed = StageReport(stage=stage.name, title="", status="failed", reason=reason)
            return RanStage(failed, "last words", stage.name == self._late)
        found = Findings(answers=(Answer("seven", "There are 7."),))
        return RanStage(StageReport(stage=stage.name, title=stage.title, status="done", findings=found), "")

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.ran]


def opened(path, run: Run = ONE, wanted=NAMES) -> LightFolder:
    return LightFolder.of(path / "light", run, Redactor(), wanted)


def light(folder: LightFolder, runner: Runner, choice: Choice = HOUR, lacks=lambda *_: "") -> LightReport:
    given: dict[str, Any] = {"stages": THREE, "run_one": runner, "lacks": lacks, "clock": lambda: runner.now}
    given |= {"questions": ASKED, "observe": lambda: Conditions(power="AC Power", swap=runner.now)}
    return run(folder, LightSettings(), choice, StageScreen(), **given)


def interrupted(path, **runs: str) -> None:
    """A run that ends at the second stage."""
    with pytest.raises(KeyboardInterrupt):
        light(opened(path), Runner(interrupted="two", **runs))


def states(report: LightReport) -> dict[str, str]:
    return {stage.stage: stage.status for stage in report.stages}


def test_an_interrupted_run_keeps_what_was_measured_and_the_next_start_measures_the_rest(tmp_path):
    interrupted(tmp_path)
    between = msgspec.json.decode((tmp_path / "light" / REPORT).read_bytes(), type=LightReport)
    again, folder = Runner(), opened(tmp_path)
    report = light(folder, again)

    assert states(between) == {"one": "done", "two": "skipped", "three": "skipped"}
    assert folder.resumed
    assert again.names == ["two", "three"]
    assert set(states(report).values()) == {"done"}


@pytest.mark.parametrize("field", ["program", "machine", "options"])
def test_another_program_machine_or_option_begins_another_folder(tmp_path, field: str):
    interrupted(tmp_path)
    value = "p 2" if field == "program" else ("other",)
    other = opened(tmp_path, msgspec.structs.replace(ONE, **{field: value}))

    assert other.path.name == "light-2"
    assert not other.done()
    assert opened(tmp_path).path.name == "light"


def test_a_stage_that_no_longer_fits_is_skipped_and_told_and_measured_by_the_next_start(tmp_path):
    """No stage gets more time than is left."""
    runner, again = Runner(), Runner()
    report = light(opened(tmp_path), runner, Choice(25))
    light(opened(tmp_path), again)

    assert states(report) == {"one": "done", "two": "done", "three": "skipped"}
    assert report.stages[2].reason == "it needs about 10 minutes, and 5.0 were left"
    assert runner.ran == [("one", 60 * 20), ("two", 60 * 15)]
    assert again.names == ["three"]


@pytest.mark.parametrize(
    ("runner", "reason"),
    [(Runner(two="it broke"), "it broke"), (Runner(late="two"), "it was late")],
    ids=["fails", "hangs"],
)
def test_a_stage_that_fails_is_a_finding_and_alone_measured_again_by_the_next_start(tmp_path, runner, reason: str):
    failed = light(opened(tmp_path), runner)
    folder, again = opened(tmp_path), Runner()
    report = light(folder, again)

    assert runner.names == NAMES
    assert (tmp_path / "light" / "logs" / "two.txt").exists()
    assert (failed.stages[1].status, failed.stages[1].reason, failed.stages[1].good) == ("failed", reason, False)
    assert folder.path.name == "light"
    assert again.names == ["two"]
    assert set(states(report).values()) == {"done"}
    assert opened(tmp_path).path.name == "light-2"


def test_a_stage_that_failed_before_is_the_last(tmp_path):
    interrupted(tmp_path, one="it broke")
    again = Runner()
    report = light(opened(tmp_path), again)

    assert again.names == ["two", "three", "one"]
    assert [stage.stage for stage in report.stages] == NAMES


def test_a_stage_that_the_end_of_the_run_ended_is_measured_by_the_next_start(tmp_path):
    ended = light(opened(tmp_path), Runner(late="two"), Choice(25))
    again = Runner(late="two")
    hung = light(opened(tmp_path), again, HOUR)

    assert (ended.stages[1].status, ended.stages[1].reason) == ("skipped", "the 25 minutes of this run were over")
    assert again.names == ["two", "three"]
    assert (hung.stages[1].status, hung.stages[1].reason) == ("failed", "it was late")


def test_what_is_left_out_is_not_asked_for_and_what_is_not_here_is_told(tmp_path):
    runner = Runner()
    choice = Choice(60, skip=("one",))
    report = light(opened(tmp_path), runner, choice, lacks=lambda stage, _: "no moon" if stage.name != "three" else "")

    assert runner.names == ["three"]
    assert [(stage.status, stage.reason) for stage in report.stages][:2] == [
        ("skipped", "it was left out by --only or --skip"),
        ("not here", "no moon"),
    ]
    assert all(stage.good for stage in report.stages)


@pytest.mark.parametrize(
    ("choice", "done", "missing", "runs"),
    [
        (HOUR, [], "", True),
        (HOUR, ["one"], "", False),
        (Choice(60, only=("one",)), ["one"], "", True),
        (Choice(60, only=("two",)), [], "", False),
        (Choice(60, skip=("one",)), [], "", False),
        (Choice(60, only=("one",), skip=("one",)), ["one"], "", False),
        (Choice(5), [], "", False),
        (HOUR, [], "no moon", False),
    ],
)
def test_a_stage_runs_that_is_chosen_not_done_and_lacks_nothing(tmp_path, choice, done, missing, runs):
    runner = Runner()
    folder = opened(tmp_path, wanted=[])
    for name in done:
        folder.save(StageReport(stage=name, title="", status="done"), "")

    light(folder, runner, choice, lacks=lambda *_: missing)

    assert ("one" in runner.names) is runs


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'{"stage": "two", "status": "moon"}'])
def test_a_damaged_result_is_measured_again_and_a_damaged_folder_refused(tmp_path, content: bytes):
    light(opened(tmp_path), Runner())
    (tmp_path / "light" / "stages" / "two.json").write_bytes(content)

    assert set(opened(tmp_path).done()) == {"one", "three"}
    (tmp_path / "light" / "run.json").write_bytes(content)
    with pytest.raises(InputError, match="choose another folder"):
        opened(tmp_path)


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_every_stage_has_questions_its_measurements_and_time_for_them_and_all_fit_into_an_hour(stage: Stage):
    assert callable(measurement(stage.name))
    assert stage.name in {question.stage for question in QUESTIONS}
    assert 0 < stage.short_minutes <= stage.minutes + 1 < stage.limit
    assert sum(each.minutes for each in STAGES) <= 55


def test_the_documents_table_of_questions_is_the_programs():
    lines = (ROOT / "docs" / "machines" / "first-light.md").read_text().splitlines()
    table = [[cell.strip() for cell in line.split("|")] for line in lines if line.count("|") == 4]

    assert [(cells[1], cells[2].strip("`")) for cells in table[2:]] == [(each.name, each.stage) for each in QUESTIONS]


def test_every_question_has_its_answer_or_the_reason_and_every_stage_its_conditions(tmp_path):
    runner = Runner(two="it broke")
    report = light(opened(tmp_path), runner, Choice(25))
    rows = {row.question: row.answers or row.reason for row in report.questions}

    assert rows == {
        "seven": ("There are 7.",),
        "eight": "it broke",
        "conditions": ("AC Power; swap from 0 to 1,200 MiB.",),
    }
    swap = [(each.before and each.before.swap, each.after and each.after.swap) for each in report.stages]
    assert swap == [(0, 600), (600, 1200), (None, None)]
    assert "Before: AC Power" in page(report)


@pytest.mark.parametrize("named", [True, False])
def test_a_stage_that_needs_a_person_runs_if_it_is_named(tmp_path, monkeypatch: pytest.MonkeyPatch, named: bool):
    monkeypatch.setitem(globals(), "THREE", [*THREE[:2], dataclasses.replace(THREE[2], needs=("you",))])
    runner = Runner()
    report = light(opened(tmp_path), runner, Choice(60, only=("three",) if named else ()))

    assert runner.names == (["three"] if named else ["one", "two"])
    assert ("--only three" in report.stages[2].reason) is not named


def test_without_mlx_only_the_machine_is_looked_at(monkeypatch: pytest.MonkeyPatch):
    """An Intel Mac, or a virtual machine in which MLX does not start."""
    monkeypatch.setattr("orchestrator.machine.hardware.mlx_device", lambda: "no Metal device")
    missing = {stage.name: lacking(stage, LightSettings()) for stage in STAGES}

    assert missing.pop("machine") == ""
    assert set(missing.values()) == {"MLX can't be used: no Metal device"}


@pytest.mark.parametrize(
    ("system", "processor", "version", "there"),
    [
        ("darwin", "arm64", "9.0", True),
        ("darwin", "x86_64", "9.0", False),
        ("darwin", "arm64", None, False),
        ("linux", "arm64", "9.0", False),
    ],
)
def test_a_neural_engine_is_needed_on_apple_silicon_with_core_ml(monkeypatch, system, processor, version, there):
    monkeypatch.setattr("sys.platform", system)
    monkeypatch.setattr("os.uname", lambda: os.uname_result(("", "", "", "", processor)))
    monkeypatch.setattr("orchestrator.machine.hardware.installed_version", lambda _: version)
    monkeypatch.setattr("orchestrator.machine.hardware.mlx_device", lambda: None)

    needing = next(stage for stage in STAGES if stage.name == "neural-engine")
    assert has_neural_engine() is there
    assert lacking(needing, LightSettings()) == ("" if there else "no Neural Engine with Core ML")


# A stage's process --------------------------------------------------------------------------------


FAKE = (sys.executable, "-m", "tests.support.fake_stage")


def ran(name: str, seconds: float = 30.0, notice: OnNotice = lambda _: None) -> RanStage:
    return run_stage(Stage(name, "", name, 1, 1), LightSettings(), seconds, notice, program=FAKE)


@pytest.mark.parametrize(
    ("name", "status", "reason", "found"),
    [
        ("good", "done", "", Findings(values=(Value("seven", 7.0),))),
        ("crashes", "failed", "its process ended by signal 11", Findings()),
        ("quits", "failed", "its process ended with exit code 3", Findings()),
        ("fails", "failed", "the compiler has had enough", Findings()),
        ("fails late", "failed", "the compiler has had enough", Findings(notes=("one", "two"))),
    ],
)
def test_a_stage_is_told_with_what_it_found_and_why_it_broke(name: str, status: str, reason: str, found: Findings):
    heard: list[str] = []
    report = ran(name, notice=heard.append).report

    assert (report.status, report.reason, report.findings) == (status, reason, found)
    assert heard == [f"{name} has begun"]


def test_a_stage_that_hangs_is_ended_when_its_time_is_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stage_process, "_ENDING_SECONDS", 0.2)
    report, _, late = ran("hangs", seconds=0.5)

    assert (report.status, late) == ("failed", True)
    assert "not done within" in report.reason


def test_an_interrupt_ends_the_stage_at_once():
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))

    with pytest.raises(KeyboardInterrupt):
        ran("waits", seconds=600.0, notice=lambda _: timer.start())
    assert not [command for _, parent, command in running() if parent == os.getpid() and "fake_stage" in command]


def test_a_stage_whose_parent_is_gone_ends_and_tidies_up():
    ours, theirs = socket.socketpair()
    program = (
        "import sys, time\n"
        "from orchestrator.lab.first_light.stage_process import end_with_parent\n"
        "end_with_parent(int(sys.argv[1]))\n"
        "try:\n    print('waiting', flush=True)\n    time.sleep(600)\n"
        "except KeyboardInterrupt:\n    print('tidied')\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(theirs.fileno())],
        pass_fds=(theirs.fileno(),),
        stdout=subprocess.PIPE,
        text=True,
    )
    theirs.close()
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    ours.close()
    output, _ = process.communicate(timeout=60)

    assert output == "tidied\n"
