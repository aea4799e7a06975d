"""The orchestrator is killed, with and without the command that started it: no process, folder or segment is left."""

import os
import random
import signal
import time
from contextlib import suppress

from orchestrator.lab.drill.command import GenerateCommand
from orchestrator.lab.drill.outcome import DrillOutcome, OnStep, left_behind, milliseconds, spread, too_late
from orchestrator.lab.drill.processes import members, own_registry, remains
from protocol.process_identity import start_time

PROMISE = "orchestrator killed: all workers gone within 2 s, the next start finds nothing stale"
_END_SECONDS = 2.0
_ERROR = "Error: The orchestrator ended unexpectedly; start it again."
_MAX_LIFE_SECONDS = 4.0
"""About two seconds of it pass while models load."""
_POLL_SECONDS = 0.002
_TIMEOUT_SECONDS = 60.0
"""For steps without a promised time."""
_MAX_TOKENS = 2000


def run(count: int, seed: int, on_step: OnStep) -> DrillOutcome:
    """Start a command `count` times, kill its orchestrator, and check what is left after the next start."""
    source = random.Random(seed)
    failures: list[str] = []
    late: list[str] = []
    times: list[float] = []
    before = ""
    with own_registry():
        for number in range(count):
            when, alone = f"seed {seed}, kill {number}", source.random() < 0.5
            command = GenerateCommand(_MAX_TOKENS)
            try:
                pid = command.find("orchestrator", _TIMEOUT_SECONDS)
                failures += _stale(before, when)
                if pid is None:
                    failures.append(f"{when}: no orchestrator started. {command.errors()}")
                else:
                    time.sleep(source.uniform(0.0, _MAX_LIFE_SECONDS))
                    times.append(_killed(command, pid, alone))
                    late += too_late(f"{when}: the end of the workers", times[-1], _END_SECONDS)
                    failures += _command_ends(command, when) if alone else []
            finally:
                command.close()
            before = command.mark
            on_step()
        last = GenerateCommand(1)
        if last.code(_TIMEOUT_SECONDS) != 0:
            failures.append(f"The start after the last kill failed: {last.errors()}")
        last.close()
        failures += _stale(before, "at the end")
    measured = f"{count} kills, {len(failures)} failures; workers ended after p50 / p99 / max {milliseconds(times)}"
    return DrillOutcome(PROMISE, measured, failures, late, {"kills": count, **spread("end", times)})


def _killed(command: GenerateCommand, orchestrator: int, alone: bool) -> float:
    """Kill the orchestrator, and the command first unless `alone`; seconds until no worker is left."""
    if not alone:
        command.kill()
    began = time.monotonic()
    with suppress(ProcessLookupError):
        os.kill(orchestrator, signal.SIGKILL)
    ended = 0.0
    # Checking known processes is faster than listing all. The list is read again at the end: a process may be new.
    while ended < began + 2 * _END_SECONDS and (found := members(command.mark)):
        while any(map(start_time, found.values())) and time.monotonic() < began + 2 * _END_SECONDS:
            time.sleep(_POLL_SECONDS)
        ended = time.monotonic()
    return (ended or time.monotonic()) - began


def _command_ends(command: GenerateCommand, when: str) -> list[str]:
    """A command whose orchestrator died, or that had just finished, ends by itself and leaves nothing behind."""
    code = command.code(_TIMEOUT_SECONDS)
    if code == 0:
        return []
    if code != 1 or not command.errors().startswith(_ERROR):
        return [f"{when}: the command ended with {code} and {command.errors()!r}"]
    return left_behind(when, command.leftovers())


def _stale(mark: str, when: str) -> list[str]:
    """A sentence for each leftover that the next start should have removed."""
    return [f"{when}: {left} of the killed command is still there." for left in remains(mark)] if mark else []
