"""Runs a program in the foreground: the terminal, its keys and its exit code are the program's."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from urllib.parse import urlsplit

from orchestrator.cli.commands.launch.invocation import AgentProgram, ModelServer
from orchestrator.runtime.session import temporary_folder
from protocol.errors import PipelineError
from protocol.security.private_files import write_private

_Handler = Callable[[int, FrameType | None], None]
_KEYS = (signal.SIGINT, signal.SIGQUIT)
"""The terminal sends these to the program too, which decides what they mean."""
_ENDINGS = (signal.SIGTERM, signal.SIGHUP)


def run_program(executable: str, program: AgentProgram, server: ModelServer, arguments: Sequence[str]) -> int:
    """Run `program` until it ends, with `server` as its model. Returns its exit code, 128 + N if signal N ended it.

    Raises PipelineError if it can't be started.
    """
    with temporary_folder() as folder:
        invocation = program.settings(server, folder)
        for name, content in invocation.files.items():
            write_private(folder / name, content.encode())
        environment = with_settings({**invocation.defaults, **os.environ}, invocation.environment, server.address)
        return _run([executable, *invocation.options, *arguments], environment)


def with_settings(environment: Mapping[str, str], settings: Mapping[str, str | None], address: str) -> dict[str, str]:
    """The user's environment with `settings`; `address` is asked directly, also where the user has a proxy."""
    merged = {**environment, **settings}
    host = urlsplit(address).hostname or ""
    if any(name.lower() in ("http_proxy", "all_proxy") for name in environment):
        direct = environment.get("no_proxy") or environment.get("NO_PROXY")
        merged["no_proxy"] = merged["NO_PROXY"] = ",".join(filter(None, (direct, host)))
    return {name: value for name, value in merged.items() if value is not None}


def _run(words: Sequence[str], environment: Mapping[str, str]) -> int:
    process: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, _: FrameType | None) -> None:
        for one in process:
            one.send_signal(number)

    # Handlers, since the program would inherit signals that are ignored.
    with _handled({**dict.fromkeys(_KEYS, _nothing), **dict.fromkeys(_ENDINGS, pass_on)}):
        try:
            process.append(subprocess.Popen(words, env=environment))
        except OSError as error:
            raise PipelineError(f"{words[0]} can't be started ({error.strerror}): install it again.") from error
        code = process[0].wait()
    return 128 - code if code < 0 else code


def _nothing(_: int, __: FrameType | None) -> None:
    pass


@contextmanager
def _handled(handlers: Mapping[int, _Handler]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
