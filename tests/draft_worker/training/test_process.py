"""The command, the process and its states: from prompts to a drafter, and again after a stop."""

import json
from contextlib import closing
from itertools import count
from pathlib import Path

import mlx.nn as nn
import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

from draft_worker.training.__main__ import Process
from draft_worker.training.answers import claim, write_answers
from draft_worker.training.optimisers import Optimisers
from draft_worker.training.rows import read_answers
from draft_worker.training.saved_state import Progressed, save
from draft_worker.training.target import Target
from orchestrator.cli.app import cli
from orchestrator.cli.commands.train_draft import training
from protocol.contracts.training import (
    TrainingChoices,
    TrainingFinished,
    TrainingOrder,
    TrainingProgress,
    TrainingReport,
)
from protocol.errors import InputError
from protocol.speculation.successors import stored_successors
from tests.support.models.tiny_models import VOCABULARY
from tests.support.models.training_work import write_target, write_work

_CHOICES = TrainingChoices(minutes=0, steps=6, tokens=100, rows=3, slots=48, head=30, batch=1)


@pytest.fixture
def order(tmp_path: Path) -> TrainingOrder:
    target = write_target(tmp_path / "target")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps([[5, 6, number]]) for number in range(4, 60)))
    out, work = tmp_path / "out", tmp_path / "work"
    return TrainingOrder(target=str(target), out=str(out), work=str(work), prompts=str(prompts), choices=_CHOICES)


@pytest.mark.thorough
def test_a_drafter_from_prompts_after_a_stop_in_the_middle(order: TrainingOrder):
    with closing(training(order, threads=1)) as reports:
        stages = {report.stage for report in _until_training(reports)}
    assert stages == {"answers", "answers to held-out prompts", "the target's states", "training"}
    state = Path(order.out) / "training" / "state.safetensors"
    assert state.is_file()

    # The answers are there, so prompts are no longer needed.
    *_, finished = training(msgspec.structs.replace(order, prompts=""), threads=1)

    assert isinstance(finished, TrainingFinished)
    assert finished.steps == 6
    assert [each.temperature for each in finished.held_out.acceptance] == [0.0, 0.7, 1.0]
    assert len(np.load(Path(order.out) / "head_tokens.npy")) == 30
    assert stored_successors(Path(order.out)) is not None


def test_the_time_holds_in_all_stages(order: TrainingOrder, monkeypatch: pytest.MonkeyPatch):
    """Every look at the clock takes half a second; without the time, a million tokens would be answered first."""
    clock = count(0.0, 0.5)
    monkeypatch.setattr("draft_worker.training.__main__.time.monotonic", lambda: next(clock))
    choices = msgspec.structs.replace(order.choices, minutes=0.1, steps=None, tokens=10**6)
    stages: list[str] = []

    def report(told: TrainingReport) -> None:
        stages.append(told.stage if isinstance(told, TrainingProgress) else "")

    finished = Process(msgspec.structs.replace(order, choices=choices), report).run()

    assert list(dict.fromkeys(stages)) == ["answers to held-out prompts", "answers", "the target's states", "training"]
    assert finished.steps >= 1
    assert len(finished.held_out.acceptance) == 3
    assert next(clock) < 60


def test_answers_end_at_the_order_s_ends(order: TrainingOrder):
    every = tuple(range(VOCABULARY))
    work, target = Path(order.work), Target(Path(order.target))

    write_answers(target, Path(order.prompts), every, work, _CHOICES, lambda _: None)

    (rows,) = (read_answers(path).own for path in sorted((work / "answers").glob("*.npz"))[:1])
    runs = np.diff(np.flatnonzero(rows.reshape(-1)))
    assert rows.any()
    assert (runs > 1).all()


def _until_training(reports):
    for report in reports:
        yield report
        if isinstance(report, TrainingProgress) and report.stage == "training":
            return


def test_a_target_without_a_stack_of_layers_is_refused(order: TrainingOrder):
    config = Path(order.target) / "config.json"
    config.write_text(json.dumps({"model_type": "mamba"}))

    with pytest.raises(InputError, match="can't be loaded"):
        list(training(order, threads=1))


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"head": 31}, "holds a training with other settings"),
        ({"layers": 2}, "holds a training with other settings"),
    ],
)
def test_what_can_t_be_trained_is_refused_before_anything_is_answered(order: TrainingOrder, choices: dict, words: str):
    settings = "--head 30 --layers 3 --seed 0"
    network = nn.Linear(1, 1)
    save(
        Path(order.out),
        Progressed(settings=settings, target=Target(Path(order.target)).fingerprint),
        network,
        Optimisers(network.trainable_parameters()),
    )
    changed = msgspec.structs.replace(order, choices=msgspec.structs.replace(order.choices, **choices))

    with pytest.raises(InputError, match=words):
        Process(changed, lambda _: None).run()

    assert not (Path(order.work) / "answers").exists()


def test_another_target_s_answers_are_not_trained_on(order: TrainingOrder, tmp_path: Path):
    work = Path(order.work)
    other = Target(write_target(tmp_path / "other", seed=1))
    write_work(work, other)
    claim(work, other)

    with pytest.raises(InputError, match="answers of another target"):
        Process(order, lambda _: None).run()


def test_too_few_prompts_are_refused(order: TrainingOrder):
    Path(order.prompts).write_text("[[5, 6]]\n")

    with pytest.raises(InputError, match="too few prompts"):
        list(training(order, threads=1))


_COMMANDS: dict[str, tuple[list[str], str]] = {
    "no data": ([], "pass files of them as --data"),
    "other files": (["--out", "notes"], "holds other files"),
    "a file": (["--out", "file"], "is a file"),
    "the target": (["--out", "target"], "is the target's own folder"),
    "long prompts": (["--data", "long.jsonl"], "1 of 1 prompts are longer than 220 tokens and left out."),
    "only long prompts": (["--data", "long.jsonl"], "no prompts that can be used"),
}


@pytest.mark.parametrize("case", _COMMANDS)
def test_what_the_command_refuses(order: TrainingOrder, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("notes", "target/work"):
        Path(folder).mkdir()
    for file in ("notes/config.json", "file"):
        Path(file).write_text("{}")
    Path("long.jsonl").write_text(json.dumps({"prompt": "abc " * 300}) + "\n")
    options, words = _COMMANDS[case]

    ended = CliRunner().invoke(cli, ["train-draft", "--target", order.target, "--out", "out", *options])

    assert ended.exit_code != 0
    assert words in " ".join(f"{ended.output} {ended.exception}".split())


@pytest.mark.thorough
def test_the_command_trains_on_shared_answers_and_prints_its_report(tmp_path: Path):
    target = Target(write_target(tmp_path / "target"))
    work = write_work(tmp_path / "work", target)
    asked = ["--target", str(target.folder), "--work", str(work), "--out", str(tmp_path / "out")]

    result = CliRunner().invoke(cli, ["train-draft", *asked, "--minutes", "0.02", "--threads", "1", "--json"])

    again = CliRunner().invoke(cli, ["train-draft", *asked, "--minutes", "0.02", "--threads", "1"])

    assert "training: " in again.stderr
    assert f"--target {target.folder} --draft {tmp_path / 'out'}" in again.stdout
    assert result.exception is None
    printed = json.loads(result.stdout)
    assert len(printed["held_out"]["acceptance"][0]["rates"]) == 5
