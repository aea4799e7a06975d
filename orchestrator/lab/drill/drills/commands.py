"""Commands that are interrupted, or whose orchestrator is killed: they end soon and leave nothing behind."""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from orchestrator.lab.drill.outcome import DrillOutcome, OnStep, left_behind, milliseconds, spread, too_late
from orchestrator.lab.drill.processes import members, own_registry, remains, until
from protocol.process_identity import start_time

_CLEANUP_SECONDS = 15.0
"""Time in which everything that a command started must end."""
_ARGUMENTS = ("generate", "import os", "--quiet", "--draft-engine", "mlx")
"""The automatic engine would begin to convert the draft on a Mac, and print a line about it."""


class GenerateCommand:
    """A running command in a process group of its own, like a shell's job."""

    def __init__(self, max_tokens: int) -> None:
        self.began = time.monotonic()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the command
        self.process = subprocess.Popen(
            [*_program(), *_ARGUMENTS, "--max-tokens", str(max_tokens)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            start_new_session=True,
        )
        self.mark = f"lp-{self.process.pid}-"
        """A text in the command lines and the folder of its pipeline, and of no other pipeline."""

    def interrupt(self) -> None:
        """SIGINT to every process of the group, like Ctrl-C."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGINT)

    def kill(self) -> None:
        self.process.kill()

    def code(self, seconds: float) -> int | None:
        """The exit code as a shell shows it (128 + signal), or None if it still runs after `seconds`."""
        with suppress(subprocess.TimeoutExpired):
            code = self.process.wait(seconds)
            return 128 - code if code < 0 else code
        return None

    def errors(self) -> str:
        """Its output on stderr."""
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")

    def find(self, program: str, seconds: float) -> int | None:
        """Process id of one of its pipeline's programs; None if it does not start within `seconds`."""
        with suppress(TimeoutError):
            return until(lambda: members(self.mark).get(program), seconds)
        return None

    def leftovers(self) -> list[str]:
        """Processes, folders and segments that remain after `_CLEANUP_SECONDS`."""
        with suppress(TimeoutError):
            until(lambda: not remains(self.mark), _CLEANUP_SECONDS)
        return remains(self.mark)

    def close(self) -> None:
        """Kill it if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._errors.close()


def _program() -> list[str]:
    """The program of `bin/launch-pipeline`, or the installed command outside a checkout."""
    start = Path(__file__).parents[4] / "bin" / ".start.py"
    if start.is_file():
        return [sys.executable, "-P", "-S", str(start)]
    return [str(Path(sys.executable).with_name("launch-pipeline"))]


# Ctrl-C ------------------------------------------------------------------------------------------

INTERRUPT_PROMISE = "Ctrl-C in any phase: ended within 5 s, exit code 130"
_INTERRUPTED_SECONDS = 5.0
_EXIT_CODE = 130
_SHORT = 200
_EARLY_SECONDS = 0.4
"""The interpreter's start and imports: a third of the interrupts come in this time."""


def interrupt(count: int, seed: int, on_step: OnStep) -> DrillOutcome:
    """Interrupt `count` commands, at moments spread over their whole run."""
    source = random.Random(seed)
    failures: list[str] = []
    late: list[str] = []
    times: list[float] = []
    with own_registry():
        moments = _moments(count, _run_time(), source)
        for number, moment in enumerate(moments):
            when = f"seed {seed}, interrupt {number} after {moment:.3f} s"
            command = GenerateCommand(_SHORT)
            try:
                time.sleep(max(0.0, command.began + moment - time.monotonic()))
                ended = command.process.poll() is not None
                began = time.monotonic()
                command.interrupt()
                code = command.code(2 * _INTERRUPTED_SECONDS)
                times.append(time.monotonic() - began)
                late += too_late(f"{when}: the end", times[-1], _INTERRUPTED_SECONDS)
                failures += [] if ended else _wrong(command, code, when)
                failures += left_behind(when, command.leftovers())
            finally:
                command.close()
            on_step()
    measured = f"{count} interrupts, {len(failures)} failures; ended after p50 / p99 / max {milliseconds(times)}"
    return DrillOutcome(INTERRUPT_PROMISE, measured, failures, late, {"interrupts": count, **spread("end", times)})


def _run_time() -> float:
    """Seconds that an undisturbed command takes."""
    command = GenerateCommand(_SHORT)
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


# The orchestrator is killed ------------------------------------------------------------------------

KILL_PROMISE = "orchestrator killed: all workers gone within 2 s, the next start finds nothing stale"
_END_SECONDS = 2.0
_ERROR = "Error: The orchestrator ended unexpectedly; start it again."
_MAX_LIFE_SECONDS = 4.0
"""About two seconds of it pass while models load."""
_POLL_SECONDS = 0.002
_TIMEOUT_SECONDS = 60.0
"""For steps without a promised time."""
_MAX_TOKENS = 2000


def kill_orchestrator(count: int, seed: int, on_step: OnStep) -> DrillOutcome:
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
    return DrillOutcome(KILL_PROMISE, measured, failures, late, {"kills": count, **spread("end", times)})


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
