"""Programs that are not trusted, such as a client's schema or a model's template, in processes of their own.

Each question has bounds of processor time and memory. What ends such a process ends nothing else.
"""

import atexit
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from protocol.child_process import NO_VARIABLES, ChildProcess
from protocol.errors import PipelineError

_PATIENCE = 60.0
"""Seconds of the clock, for a machine that gives the process no time."""
_ATTEMPTS = 2
_KEPT = 2
"""Processes that wait for the next question."""
_IDLE_SECONDS = 600
"""After so long without a question a process ends."""
_ADDRESSES = 1 << 48
"""More than a process has."""
_NO_MEMORY = 77
"""The exit code for it."""


class Bounds(NamedTuple):
    """Of one question."""

    seconds: int
    """Of processor time. Whole ones: the system counts no others."""
    memory: int
    """Bytes of the process."""


class BoundExceeded(Exception):
    """`str` goes on behind the question's name: "takes over 3 s of processor time", or "fails"."""


class BoundedProcesses:
    """A program that answers questions with `answer_questions`. For any thread; each question has a process to itself,
    which is started when none is free."""

    def __init__(self, command: Sequence[str], bounds: Bounds, variables: Mapping[str, str] = NO_VARIABLES) -> None:
        self._command = command
        self._bounds = bounds
        self._variables = variables
        self._lock = threading.Lock()
        self._free: list[ChildProcess] = []
        self._asked: set[ChildProcess] = set()
        self._closed = False
        atexit.register(self.close)

    def ask(self, question: Any) -> msgspec.Raw:
        """The answer in JSON. Raises BoundExceeded, and PipelineError if this machine can't run the process."""
        # Again: the process may have been ended by another cause once.
        for _ in range(_ATTEMPTS):
            process = self._taken()
            try:
                process.send(question)
                answer = process.report(msgspec.Raw, _PATIENCE)
            except TimeoutError:
                self._end(process)
                raise PipelineError(
                    f"This machine gave a process no time for {_PATIENCE:.0f} s: try again when it is less busy."
                ) from None
            except OSError:
                answer = None
            except BaseException:  # also Ctrl-C: its answer is nobody's
                self._end(process)
                raise
            if answer is not None:
                self._release(process)
                return answer
            # Its output ends a moment before it does.
            code = process.wait(1.0)
            self._end(process)
            if code == -signal.SIGXCPU:
                raise BoundExceeded(f"takes over {self._bounds.seconds} s of processor time")
            if code == _NO_MEMORY:
                raise BoundExceeded(f"takes over {self._bounds.memory >> 20:,} MiB of memory")
            if self._closed:
                break
        raise BoundExceeded("fails")

    def close(self) -> None:
        """End all processes; who waits for one gets BoundExceeded."""
        self._closed = True
        with self._lock:
            free, self._free = self._free, []
            for process in list(self._asked):
                with suppress(OSError):
                    process.terminate()
        for process in free:
            self._end(process)

    def _taken(self) -> ChildProcess:
        while True:
            with self._lock:
                process = self._free.pop() if self._free else None
            if process is None:
                break
            if process.running:
                self._asked.add(process)
                return process
            self._end(process)
        try:
            process = ChildProcess(self._command, variables=self._variables, asked=True)
        except OSError as error:
            raise PipelineError(f"No process can be started ({error.strerror}): try again later.") from error
        self._asked.add(process)
        return process

    def _release(self, process: ChildProcess) -> None:
        with self._lock:
            self._asked.discard(process)
            kept = len(self._free) < _KEPT and not self._closed
            if kept:
                self._free.append(process)
        if not kept:
            self._end(process)

    def _end(self, process: ChildProcess) -> None:
        self._asked.discard(process)
        with process:
            process.end()


def answer_questions(answer: Callable[[bytes], Any], bounds: Bounds) -> None:
    """The program's loop: for each line of standard input one of standard output, in JSON."""
    # Without the traces that a fault leaves.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS):
        limit_memory(kind, bounds.memory)
    while True:
        signal.alarm(_IDLE_SECONDS)
        line = sys.stdin.buffer.readline()
        signal.alarm(0)
        if not line:
            return
        usage = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_CPU, int(usage.ru_utime + usage.ru_stime) + 1 + bounds.seconds)
        try:
            found = msgspec.json.encode(answer(line))
        except MemoryError:
            # Whatever state it leaves, the next question gets a fresh process.
            os._exit(_NO_MEMORY)
        sys.stdout.buffer.write(found + b"\n")
        sys.stdout.buffer.flush()


def limit_memory(kind: int, size: int) -> None:
    """Bytes of this process, or further ones where the system takes no limit below what a process has.

    macOS counts addresses, also of libraries that all processes share (`dosetrlimit`, bsd/kern/kern_resource.c).
    """
    if _limit(kind, size):
        return
    refused, taken = size, _ADDRESSES
    while taken - refused > size // 8:
        middle = (refused + taken) // 2
        refused, taken = (refused, middle) if _limit(kind, middle) else (middle, taken)
    _limit(kind, taken + size)


def _limit(kind: int, value: int) -> bool:
    """Whether the system took it."""
    _, most = resource.getrlimit(kind)
    try:
        resource.setrlimit(kind, (value, most))
    except (OSError, ValueError):
        return False
    return True
