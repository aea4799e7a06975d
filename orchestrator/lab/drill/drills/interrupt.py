"""Ctrl-C at any moment of a command: it ends soon, prints one line at most, and has exit code 130."""

import random
import time

from orchestrator.lab.drill.command import GenerateCommand
from orchestrator.lab.drill.outcome import DrillOutcome, OnStep, left_behind, milliseconds, spread, too_late
from orchestrator.lab.drill.processes import own_registry

PROMISE = "Ctrl-C in any phase: ended within 5 s, exit code 130"
_END_SECONDS = 5.0
_EXIT_CODE = 130
_MAX_TOKENS = 200
_EARLY_SECONDS = 0.4
"""The interpreter's start and imports: a third of the interrupts come in this time."""


def run(count: int, seed: int, on_step: OnStep) -> DrillOutcome:
    """Interrupt `count` commands, at moments spread over their whole run."""
    source = random.Random(seed)
    failures: list[str] = []
    late: list[str] = []
    times: list[float] = []
    with own_registry():
        moments = _moments(count, _run_time(), source)
        for number, moment in enumerate(moments):
            when = f"seed {seed}, interrupt {number} after {moment:.3f} s"
            command = GenerateCommand(_MAX_TOKENS)
            try:
                time.sleep(max(0.0, command.began + moment - time.monotonic()))
                ended = command.process.poll() is not None
                began = time.monotonic()
                command.interrupt()
                code = command.code(2 * _END_SECONDS)
                times.append(time.monotonic() - began)
                late += too_late(f"{when}: the end", times[-1], _END_SECONDS)
                failures += [] if ended else _wrong(command, code, when)
                failures += left_behind(when, command.leftovers())
            finally:
                command.close()
            on_step()
    measured = f"{count} interrupts, {len(failures)} failures; ended after p50 / p99 / max {milliseconds(times)}"
    return DrillOutcome(PROMISE, measured, failures, late, {"interrupts": count, **spread("end", times)})


def _run_time() -> float:
    """Seconds that an undisturbed command takes."""
    command = GenerateCommand(_MAX_TOKENS)
    try:
        command.process.wait(60.0)
        return time.monotonic() - command.began
    finally:
        command.close()


def _moments(count: int, run_time: float, source: random.Random) -> list[float]:
    """A third of the moments early, the others evenly over the whole run; in a random order."""
    early = count // 3
    moments = [_EARLY_SECONDS * (index + source.random()) / early for index in range(early)]
    moments += [run_time * (index + source.random()) / (count - early) for index in range(count - early)]
    source.shuffle(moments)
    return moments


def _wrong(command: GenerateCommand, code: int | None, when: str) -> list[str]:
    """A command that had just finished may also end with exit code 0."""
    errors = command.errors().strip()
    if code == 0 and not errors:
        return []
    if code != _EXIT_CODE or errors not in ("", "Interrupted."):
        return [f"{when}: exit code {code}, stderr {errors[-300:]!r}"]
    return []
