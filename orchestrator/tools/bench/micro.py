"""`launch-pipeline bench --micro`: single steps of the workers, each measured in a process of its own."""

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import msgspec
from rich.table import Table

from orchestrator.machine.hardware import chip, worker_environment
from protocol.contracts.figure import Figure
from protocol.errors import PipelineError

_PROGRAMS = (
    "draft_worker.coreml.host_overhead",
    "orchestrator.tools.bench.micro_adoption",
    "orchestrator.tools.bench.micro_telemetry",
)
_TIMEOUT_SECONDS = 600.0


def measured(programs: Sequence[str] = _PROGRAMS) -> list[Figure]:
    """Raises PipelineError if a process fails."""
    return [figure for program in programs for figure in _run(program)]


def table(figures: Sequence[Figure]) -> Table:
    """A row a figure; what exceeds its limit is marked."""
    rows = Table(title=f"Single steps, medians, one core of {chip()}")
    for column in ("step", "value", "limit"):
        rows.add_column(column, justify="left" if column == "step" else "right")
    for figure in figures:
        limit = "" if figure.limit is None else f"{figure.limit:g} {figure.unit}"
        value = f"{figure.value:.3f} {figure.unit}".strip()
        rows.add_row(figure.name, value if figure.within_limit else f"[red]{value}[/red]", limit)
    return rows


def to_json(figures: Sequence[Figure]) -> dict[str, Any]:
    """The figures and the machine as JSON values."""
    return {"machine": chip(), "figures": msgspec.to_builtins(figures)}


def _run(program: str) -> list[Figure]:
    # The limits are stated for one core, which is what a draft worker has on a small machine.
    environment = {**os.environ, **worker_environment("draft", (0,))}
    command = [sys.executable, "-m", program]
    try:
        out = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, env=environment)
    except subprocess.TimeoutExpired as error:
        text = f"{program} gave no figures within {_TIMEOUT_SECONDS:.0f} s: try again on an idle machine."
        raise PipelineError(text) from error
    if out.returncode:
        last_line = (out.stderr.strip().splitlines() or ["none"])[-1]
        raise PipelineError(f"{program} failed; its last line: {last_line}")
    return msgspec.json.decode(out.stdout, type=list[Figure])
