"""The orchestrator is killed at random moments, with and without the command that started it: nothing is left."""

import os
import random
import signal
import time
from contextlib import suppress

from orchestrator.tools.drill.command import GenerateCommand
from orchestrator.tools.drill.outcome import DrillOutcome, OnStep, milliseconds, spread, too_late
from orchestrator.tools.drill.processes import members, own_registry, remains
from protocol.process_identity import start_time

PROMISE = "orchestrator killed: all workers gone within 2 s, the next start finds nothing stale"
_GONE = 2.0
_SENTENCE = "Error: The orchestrator ended unexpectedly; start it again."
_LONGEST_LIFE = 4.0
"""Seconds: about two of them pass while models load."""
_LOOK = 0.002
_PATIENCE = 60.0
"""Seconds for what has no promised time: a busy machine takes long."""
_ARGUMENTS = ("generate", "import os", "--max-tokens", "2000", "--quiet")


def run(count: int, seed: int, on_step: OnStep) -> DrillOutcome:
    """Start a command `count` times, kill its orchestrator, and look at what is left once the next one has started."""
    source = random.Random(seed)  # noqa: S311 - no secret
    failures: list[str] = []
    late: list[str] = []
    times: list[float] = []
    before = ""
    with own_registry():
        for number in range(count):
            when, alone = f"seed {seed}, kill {number}", source.random() < 0.5
            command = GenerateCommand(*_ARGUMENTS)
            try:
                pid = command.find("orchestrator", _PATIENCE)
                failures += _stale(before, when)
                if pid is None:
                    failures.append(f"{when}: no orchestrator came up. {command.words()}")
                else:
                    time.sleep(source.uniform(0.0, _LONGEST_LIFE))
                    times.append(_killed(command, pid, alone))
                    late += too_late(f"{when}: the end of the workers", times[-1], _GONE)
                    failures += _last_word(command, when) if alone else []
            finally:
                command.close()
            before = command.mark
            on_step()
        last = GenerateCommand("generate", "import os", "--max-tokens", "1", "--quiet")
        failures += [] if last.code(_PATIENCE) == 0 else [f"The start after the last kill failed: {last.words()}"]
        last.close()
        failures += _stale(before, "at the end")
    measured = f"{count} kills, {len(failures)} failures; workers gone after p50 / p99 / most {milliseconds(times)}"
    return DrillOutcome(PROMISE, measured, failures, late, {"kills": count, **spread("gone", times)})


def _killed(command: GenerateCommand, orchestrator: int, alone: bool) -> float:
    """Kill the orchestrator, and the command before it unless `alone`: seconds until no worker is left."""
    if not alone:
        command.kill()
    began = time.monotonic()
    with suppress(ProcessLookupError):
        os.kill(orchestrator, signal.SIGKILL)
    gone = 0.0
    # Asking after a few processes is quicker than listing all, which is done again at the end: one may be new.
    while gone < began + 2 * _GONE and (found := members(command.mark)):
        while any(map(start_time, found.values())) and time.monotonic() < began + 2 * _GONE:
            time.sleep(_LOOK)
        gone = time.monotonic()
    return (gone or time.monotonic()) - began


def _last_word(command: GenerateCommand, when: str) -> list[str]:
    """A command whose orchestrator died, or that had just ended well, ends by itself and takes everything with it."""
    code = command.code(_PATIENCE)
    if code == 0:
        return []
    if code != 1 or not command.words().startswith(_SENTENCE):
        return [f"{when}: the command ended with {code} and {command.words()!r}"]
    return [f"{when}: {left} was left behind." for left in command.leftovers()]


def _stale(mark: str, when: str) -> list[str]:
    """What the start of the next one should have swept up."""
    return [f"{when}: {left} of the one before is still there." for left in remains(mark)] if mark else []
