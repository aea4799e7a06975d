"""A process that reports in lines of JSON on its standard output: both ends. Knows neither its job nor its reports.

Its standard output is for reports alone once it has claimed it; a line that is none is left out.
"""

import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import IO, Any, Self, TypeVar

import msgspec

from protocol.errors import InputError, PipelineError


def module_command(module: str) -> tuple[str, ...]:
    """The command that runs `module` with this Python.

    `-P`: Python would otherwise look for modules in the current folder first, and take those of another version's
    checkout.
    """
    return (sys.executable, "-P", "-m", module)


_PIECE = 1 << 16
_MOST_WORDS = 500
"""Characters of the last words."""
NO_VARIABLES: Mapping[str, str] = MappingProxyType({})
_Report = TypeVar("_Report")


class Failed(msgspec.Struct, frozen=True, tag="failed", forbid_unknown_fields=True):
    """The end of a job that failed, with a sentence for the user."""

    text: str
    input_error: bool
    """The user's input is the cause, not the machine."""


def claim_output() -> Callable[[Any], None]:
    """A function that writes a report as one line of JSON to the standard output. Nothing else gets there from now on:
    what Python's `print` and native code (Core ML's compiler) write to descriptor 1 goes to the standard error."""
    sys.stdout.flush()
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def report(what: Any) -> None:
        output.write(msgspec.json.encode(what) + b"\n")
        output.flush()

    return report


def reports(
    module: str,
    order: msgspec.Struct,
    report: Any,
    last: tuple[type[_Report], ...] = (),
    *,
    name: str,
    grace: float = 0.0,
    variables: Mapping[str, str] = NO_VARIABLES,
) -> Generator[Any, None, None]:
    """Run `python -m module ORDER`, one long job; its reports, of the union type `report`, up to one of the types
    `last`, or to its end with exit code 0.

    Closing the generator early asks the process to end and gives it `grace` seconds to put its files in order. Raises
    InputError or PipelineError with the process's own sentence if the job fails. `name`: such as "The conversion".
    """
    command = [*module_command(module), msgspec.json.encode(order).decode()]
    with ChildProcess(command, variables=variables, session=False) as process:
        try:
            while (found := process.report(report)) is not None:
                if isinstance(found, Failed):
                    raise (InputError if found.input_error else PipelineError)(found.text)
                yield found
                if isinstance(found, last):
                    return
            if last or process.wait(grace) != 0:
                raise PipelineError(f"{name} ended unexpectedly; start it again. Its last words: {process.last_words}")
        finally:
            process.end(grace)


class ChildProcess:
    """Runs from its construction on, as long as the context that it is, unless `end` comes earlier.

    One thread at a time; `terminate` alone may come from another one.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        variables: Mapping[str, str] = NO_VARIABLES,
        asked: bool = False,
        inherited: Sequence[int] = (),
        session: bool = True,
        words: IO[bytes] | None = None,
    ) -> None:
        """`variables`: of its environment, beyond our own. `asked`: it reads what `send` sends. `inherited`:
        descriptors that it may use. `session`: Ctrl-C at the terminal reaches this process alone. `words`: a file for
        its standard error instead of a temporary one; it is closed at the end. Raises OSError if nothing can be
        started.
        """
        self._words = words or tempfile.TemporaryFile()  # noqa: SIM115 - closed behind the context
        self._reports: deque[Any] = deque()
        self._pending = bytearray()
        self._session = session
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE if asked else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=self._words,
                pass_fds=tuple(inherited),
                start_new_session=session,
                env={**os.environ, **variables},
            )
        except OSError:
            self._words.close()
            raise
        assert self._process.stdout is not None
        self._output = self._process.stdout

        self._told_to_end = self._ended = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self._words.close()

    def fileno(self) -> int:
        """Readable when `read` has something to read."""
        return self._output.fileno()

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def send(self, message: Any) -> None:
        """Write a line of JSON. Raises OSError if the process has ended."""
        pipe = self._process.stdin
        assert pipe is not None
        pipe.write(msgspec.json.encode(message) + b"\n")
        pipe.flush()

    def read(self, kind: Any, seconds: float | None = None) -> list[Any] | None:
        """The reports of the type `kind` that the next piece of its output completes; None at the end of the output.

        None of them after so many seconds of silence.
        """
        # Not `select`, which knows the first 1024 descriptors alone: a server has more.
        with selectors.DefaultSelector() as selector:
            selector.register(self._output, selectors.EVENT_READ)
            if not selector.select(None if seconds is None else max(0.0, seconds)):
                return []
        piece = os.read(self._output.fileno(), _PIECE)
        if not piece:
            return None
        first, *others = piece.split(b"\n")
        self._pending += first
        if not others:
            return []
        whole, self._pending = bytes(self._pending), bytearray(others.pop())
        return list(_reports((whole, *others), kind))

    def report(self, kind: Any, seconds: float | None = None) -> Any | None:
        """The next report; None at the end of the output. Raises TimeoutError if it takes more than so many seconds."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while not self._reports:
            left = None if deadline is None else deadline - time.monotonic()
            found = self.read(kind, left)
            if found is None:
                return None
            if left is not None and left <= 0.0 and not found:
                raise TimeoutError
            self._reports += found
        return self._reports.popleft()

    def wait(self, seconds: float | None = None) -> int | None:
        """The exit code, negative for a signal; None if it still runs after so many seconds."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    @property
    def last_words(self) -> str:
        """The last line of its standard error."""
        return (self.words().strip().splitlines() or ["none"])[-1][:_MOST_WORDS]

    def words(self, most: int | None = None) -> str:
        """Its standard error; with `most` whole lines at the end of so many bytes: half a name would not be known."""
        # The process may still write where the file's own place is.
        file, size = self._words.fileno(), os.fstat(self._words.fileno()).st_size
        cut = 0 if most is None else max(0, size - most)
        said = os.pread(file, size - cut, cut)
        return (said.partition(b"\n")[2] if cut else said).decode(errors="replace")

    def terminate(self, by: signal.Signals = signal.SIGTERM) -> None:
        """Ask it to end, once: a second signal would interrupt its cleaning up. Who waits for a report gets None."""
        if not self._told_to_end:
            self._told_to_end = True
            self._process.send_signal(by)

    def end(self, grace: float = 0.0, *, by: signal.Signals = signal.SIGTERM) -> None:
        """Ask it to end, and kill it, and what it started in its session, after `grace` seconds."""
        if self._ended:
            return
        self._ended = True
        self.terminate(by)
        with suppress(subprocess.TimeoutExpired):
            # A process that can't write its answers would end before its files are in order, so they are read.
            self._process.communicate(timeout=grace)
        if self._session:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.communicate()


def _reports(lines: Iterable[bytes], kind: Any) -> Iterator[Any]:
    for line in lines:
        # A library may have printed something before the program claimed its output.
        with suppress(msgspec.DecodeError, UnicodeDecodeError):
            yield msgspec.json.decode(line, type=kind)
