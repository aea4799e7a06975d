"""Ctrl-C at any moment, from the interpreter's first to the last: gone soon, one line at most, exit code 130."""

import random
import time

from orchestrator.tools.drill.command import GenerateCommand
from orchestrator.tools.drill.outcome import DrillOutcome, OnStep, milliseconds, spread, too_late
from orchestrator.tools.drill.processes import own_registry

PROMISE = "Ctrl-C in any phase: gone within 5 s, exit code 130"
_GONE = 5.0
_INTERRUPTED = 130
_ARGUMENTS = ("generate", "import os", "--max-tokens", "200", "--quiet")
_EARLY = 0.4
"""Seconds in which a third of the interrupts come: the interpreter's start and imports."""


def run(count: int, seed: int, on_step: OnStep) -> DrillOutcome:
    """Interrupt `count` commands, at moments spread over their whole life."""
    source = random.Random(seed)  # noqa: S311 - no secret
    failures: list[str] = []
    late: list[str] = []
    times: list[float] = []
    with own_registry():
        moments = _moments(count, _whole_life(), source)
        for number, moment in enumerate(moments):
            when = f"seed {seed}, interrupt {number} after {moment:.3f} s"
            command = GenerateCommand(*_ARGUMENTS)
            try:
                time.sleep(max(0.0, command.began + moment - time.monotonic()))
                ended = command.process.poll() is not None
                began = time.monotonic()
                command.interrupt()
                code = command.code(2 * _GONE)
                times.append(time.monotonic() - began)
                late += too_late(f"{when}: the end", times[-1], _GONE)
                failures += [] if ended else _wrong(command, code, when)
                failures += [f"{when}: {left} was left behind." for left in command.leftovers()]
            finally:
                command.close()
            on_step()
    measured = f"{count} interrupts, {len(failures)} failures; gone after p50 / p99 / most {milliseconds(times)}"
    return DrillOutcome(PROMISE, measured, failures, late, {"interrupts": count, **spread("gone", times)})


def _whole_life() -> float:
    """Seconds that an undisturbed command takes."""
    command = GenerateCommand(*_ARGUMENTS)
    try:
        command.process.wait(60.0)
        return time.monotonic() - command.began
    finally:
        command.close()


def _moments(count: int, life: float, source: random.Random) -> list[float]:
    """A third of the moments early, the others evenly over the whole life; in a random order."""
    early = count // 3
    moments = [_EARLY * (index + source.random()) / early for index in range(early)]
    moments += [life * (index + source.random()) / (count - early) for index in range(count - early)]
    source.shuffle(moments)
    return moments


def _wrong(command: GenerateCommand, code: int | None, when: str) -> list[str]:
    """One that had just done its work may also end with 0."""
    if code == 0 and not command.words():
        return []
    words = command.words().strip()
    if code != _INTERRUPTED or words not in ("", "Interrupted."):
        return [f"{when}: exit code {code}, and it said {words[-300:]!r}"]
    return []
