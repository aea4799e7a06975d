"""`doctor --target MODEL`: what one forward of it verifies, by a process that loads it."""

import os
import subprocess
from pathlib import Path

import msgspec

from orchestrator.machine.finding import Finding
from orchestrator.machine.hardware import worker_environment
from orchestrator.machine.models.checkpoints import resolve
from orchestrator.machine.models.levels import MEANINGS
from orchestrator.machine.progress import OnProgress, silent
from protocol.contracts.model_report import ModelRefusal, ModelReport
from protocol.errors import InputError
from protocol.own_modules import module_command
from protocol.shown_names import model_name

_PATIENCE = 1800.0
"""Seconds for loading a model of hundreds of GB."""


def target_finding(name: str, on_progress: OnProgress = silent) -> Finding:
    """The model may be downloaded or converted for it."""
    try:
        folder = resolve(name, "target", on_progress)
    except InputError as error:
        return Finding("target", "fail", str(error))
    command = [*module_command("target_worker.model_examination"), str(folder)]
    environment = {**os.environ, **worker_environment("target", ())}
    try:
        answer = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PATIENCE, check=False, env=environment
        )
        report = msgspec.json.decode(answer.stdout, type=ModelReport | ModelRefusal)
    except (subprocess.TimeoutExpired, msgspec.DecodeError):
        text = f"{folder} could not be loaded: the process that loads it crashed or hung"
        return Finding("target", "fail", text, "free memory, download the model again, or choose a smaller one")
    return described(folder, report)


def described(folder: Path, report: ModelReport | ModelRefusal) -> Finding:
    if isinstance(report, ModelRefusal):
        return Finding("target", "fail", report.text)
    higher = f" It is no higher level: {report.reason.rstrip('.')}." if report.reason else ""
    joint = "share a forward" if report.joins else "are evaluated in turns"
    text = (
        f"{model_name(folder)} ({report.architecture}) is a {report.level} model: {MEANINGS[report.level]}.{higher} "
        f"Several requests {joint}; the context is {report.context:,} tokens. {_recording(report.recorded_layers)}"
    )
    return Finding("target", "ok", text)


def _recording(layers: int) -> str:
    if layers:
        return f"The states of its {layers} layers can be recorded for a trained drafter."
    return "Its states can't be recorded, so that no trained drafter but an early exit can draft for it."
