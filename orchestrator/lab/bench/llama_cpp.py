"""llama.cpp's own server as a rival: a process for each of its ways to decode, and figures by its own clock.

The user brings the program. It reads the GGUF file that the target was made from.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from orchestrator.lab.bench.contender import LLAMA_CPP, Family, GenerationTask, TimedGeneration
from orchestrator.machine.checkpoints import gguf_file
from orchestrator.machine.default_target import default_gguf, is_default_target
from orchestrator.machine.hardware import usable_cores
from orchestrator.machine.package_index import Unavailable
from protocol.errors import InputError, PipelineError

_PROGRAM = "llama-server"
_SHORT_MATCH = ("--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "8")
DECODINGS: dict[str, tuple[str, ...]] = {
    LLAMA_CPP: (),
    f"{LLAMA_CPP} ngram-simple": ("--spec-type", "ngram-simple"),
    f"{LLAMA_CPP} ngram-simple, trigrams": ("--spec-type", "ngram-simple", *_SHORT_MATCH),
    f"{LLAMA_CPP} ngram-map-k": ("--spec-type", "ngram-map-k"),
    f"{LLAMA_CPP} ngram-map-k4v": ("--spec-type", "ngram-map-k4v"),
}
"""Options by contender. `ngram-cache` and `ngram-mod` are left out: they remember earlier requests, and a bench repeats
its requests. So are drafts: ours is in no form that the program reads."""
_SAMPLERS = {"samplers": ["temperature"], "repeat_penalty": 1.0}
"""Nothing but the temperature, like everyone."""
LOADING_SECONDS = 20 * 60.0
"""Of a large target from a slow disk, several times over: a server that takes longer hangs."""
JOB_SECONDS = 10 * 60.0
"""Of one generation, which takes seconds to a few minutes."""
PACED = "a paced run holds every forward to a device's time, and its loops compute forwards of their own"
"""Why a paced run has no rivals."""
OnRivalAbsent = Callable[[str, str], None]
"""Called with the name of a rival that can't run and with half a sentence: the reason."""
_LOOK_SECONDS = 0.1
_END_SECONDS = 5.0
_UNTIL_EOF = 'exec 3<&0; "$@" </dev/null 3<&- & server=$!; (cat <&3 >/dev/null; kill $server) & wait $server'
"""Runs a program until the standard input ends: the server ends with a bench that is killed."""


def open_llama_cpp(
    target: str | None,
    folder: Path,
    stack: ExitStack,
    on_start: Callable[[str], None],
    on_absent: OnRivalAbsent,
) -> "list[LlamaCppContender]":
    """A contender for each way to decode, loaded and idle; `stack` ends their processes.

    `target`: its name on the command line, None for the default; `folder`: of the same model. What can't run has no
    contender.
    """
    program = shutil.which(_PROGRAM)
    if program is None:
        on_absent(LLAMA_CPP, f"there is no {_PROGRAM} on the PATH: install llama.cpp")
        return []
    try:
        file = default_gguf() if is_default_target(folder) else gguf_file(target or "")
    except (Unavailable, InputError) as error:
        on_absent(LLAMA_CPP, str(error).rstrip("."))
        return []
    if file is None:
        on_absent(LLAMA_CPP, "it reads GGUF files only: give one by --target FILE.gguf")
        return []
    contenders: list[LlamaCppContender] = []
    for name, options in DECODINGS.items():
        on_start(name)
        try:
            port = stack.enter_context(_running(name, [program, "--model", str(file), *options]))
        except PipelineError as error:
            on_absent(name, str(error).rstrip("."))
        else:
            contenders.append(LlamaCppContender(name, port))
    return contenders


class LlamaCppContender:
    """A running server."""

    family: Family = "rival"

    def __init__(self, name: str, port: int) -> None:
        self.name = name
        self.port = port

    def generate(self, task: GenerationTask) -> TimedGeneration:
        """Raises PipelineError if the server ended or hangs."""
        began = time.perf_counter()
        try:
            # All but the last token, so that the second request, whose times count, reads one token.
            list(self._stream({"prompt": task.tokens[:-1] or task.tokens, "n_predict": 0, "cache_prompt": False}))
            found = {"temperature": task.temperature, "seed": task.seed, "return_tokens": True, **_SAMPLERS}
            pieces = self._stream({"prompt": task.tokens, "n_predict": task.max_tokens, "cache_prompt": True, **found})
            tokens: list[int] = []
            arrivals: list[float] = []
            timings: dict[str, Any] = {}
            for piece in pieces:
                new = piece.get("tokens", [])
                tokens += new
                arrivals += [time.perf_counter() - began] * len(new)
                timings = piece.get("timings", timings)
            seconds = (timings["prompt_ms"] + timings["predicted_ms"]) / 1e3
            count = timings["predicted_n"]
        except (OSError, HTTPException, ValueError, KeyError) as error:
            raise PipelineError(f"{self.name} gave no answer ({error}): start the bench without it.") from error
        # The end token has no piece of its own.
        arrivals += [time.perf_counter() - began] * (count - len(arrivals))
        return TimedGeneration(
            tokens=tuple(tokens),
            tokens_per_second=count / seconds,
            tokens_per_round=count / max(1, count - timings.get("draft_n_accepted", 0)),
            arrivals=tuple(arrivals),
        )

    def _stream(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The pieces of an answer, as they come."""
        with _connected(self.port, JOB_SECONDS) as connection:
            connection.request("POST", "/completion", json.dumps({**body, "stream": True}))
            response = connection.getresponse()
            if response.status != 200:
                raise ValueError(response.read(300).decode(errors="replace"))
            for line in response:
                if line.startswith(b"data: {"):
                    yield json.loads(line.removeprefix(b"data: "))


@contextmanager
def _running(name: str, command: list[str]) -> Iterator[int]:
    """The port of a server that has loaded its model; it ends with the context. Raises PipelineError if it does not
    start."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    command = [*command, "--host", "127.0.0.1", "--port", str(port), "--parallel", "1"]
    command += ["--threads", str(len(usable_cores()))]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            ["/bin/sh", "-c", _UNTIL_EOF, "sh", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,
        )
        with process:
            try:
                deadline = time.monotonic() + LOADING_SECONDS
                while not _healthy(port):
                    if process.poll() is not None or time.monotonic() > deadline:
                        log.seek(0)
                        lines = log.read().decode(errors="replace").strip().splitlines() or ["nothing"]
                        raise PipelineError(f"the process of {name} did not start; its last line: {lines[-1][:500]}")
                    time.sleep(_LOOK_SECONDS)
                yield port
            finally:
                _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)


def _healthy(port: int) -> bool:
    try:
        with _connected(port, 5.0) as connection:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False


@contextmanager
def _connected(port: int, seconds: float) -> Iterator[HTTPConnection]:
    connection = HTTPConnection("127.0.0.1", port, timeout=seconds)
    try:
        yield connection
    finally:
        connection.close()
