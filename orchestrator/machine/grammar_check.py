"""Whether a grammar can be enforced, asked in a process of its own.

A client's schema is a program for a library in another language, whose faults would end the server with it. Here they
end that process: it has limits of processor time and memory for each grammar. It starts with the first one.
"""

import atexit
import resource
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache

import msgspec

from orchestrator.machine.child_process import ChildProcess
from protocol.errors import InputError, PipelineError
from protocol.messages.grammar import Grammar
from protocol.own_modules import module_command

_SECONDS = 3
"""Of processor time; the largest honest schemas take 0.3. Whole ones: the system counts no others."""
_MEMORY = 1 << 30
_PATIENCE = 60.0
"""Seconds of the clock, for a machine that gives the process no time."""
_ATTEMPTS = 2
_VARIABLES: Mapping[str, str] = {"OPENBLAS_NUM_THREADS": "1"}


class GrammarCheck:
    """The process, started when it is needed. For any thread: one at a time is served."""

    def __init__(self, command: Sequence[str] | None = None) -> None:
        self._command = command or module_command(__name__)
        self._lock = threading.Lock()
        self._process: ChildProcess | None = None
        atexit.register(self.terminate)

    def flaw(self, grammar: Grammar) -> str | None:
        """Why this grammar can't be enforced, as a sentence; None if it can. Raises PipelineError if nobody can say."""
        with self._lock:
            for _ in range(_ATTEMPTS):
                try:
                    return self._answer(grammar)
                except _Ended as ended:
                    if ended.by == signal.SIGXCPU:
                        return f"This JSON schema can't be enforced: checking it takes over {_SECONDS} s."
        # Twice: the process may have been ended by another cause once.
        return "This JSON schema can't be enforced: the library that checks it fails."

    def terminate(self) -> None:
        """Let the process end; who waits for it gets an error."""
        if self._process is not None:
            with suppress(OSError):
                self._process.terminate()

    def close(self) -> None:
        with self._lock:
            self._close()

    def _answer(self, grammar: Grammar) -> str | None:
        """Raises _Ended if the process ended."""
        if self._process is None or not self._process.running:
            self._close()
            try:
                self._process = ChildProcess(self._command, variables=_VARIABLES, asked=True)
            except OSError as error:
                raise PipelineError(f"No schema can be checked now ({error.strerror}): try again later.") from error
        try:
            self._process.send(grammar)
            line = self._process.line(_PATIENCE)
        except TimeoutError:
            self._close()
            raise PipelineError(f"This machine had no time to check a schema for {_PATIENCE:.0f} s.") from None
        except OSError:
            line = None
        if line is None:
            # Its output ends a moment before it does.
            raise _Ended(-(self._process.wait(1.0) or 0))
        return msgspec.json.decode(line, type=str | None)

    def _close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with process:
                process.end()


class _Ended(Exception):
    def __init__(self, by: int) -> None:
        """`by`: the signal, or 0."""
        self.by = by


_check = GrammarCheck()


@lru_cache(maxsize=64)
def _flaw(grammar: Grammar) -> str | None:
    return _check.flaw(grammar)


def require_enforceable(grammar: Grammar | None) -> None:
    """Raise InputError if the grammar can't be enforced."""
    reason = None if grammar is None else _flaw(grammar)
    if reason is not None:
        raise InputError(reason)


def main() -> None:
    """For each line of standard input, a grammar, one of standard output: the reason or null."""
    from protocol.sampling.grammar import flaw

    # Without the traces that a fault leaves.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for limit in (resource.RLIMIT_DATA, resource.RLIMIT_AS):
        _, most = resource.getrlimit(limit)
        with suppress(OSError, ValueError):
            resource.setrlimit(limit, (_MEMORY, most))
    for line in sys.stdin.buffer:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        _, most = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (int(usage.ru_utime + usage.ru_stime) + 1 + _SECONDS, most))
        reason = flaw(msgspec.json.decode(line, type=Grammar))
        sys.stdout.buffer.write(msgspec.json.encode(reason) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
