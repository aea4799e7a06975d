"""`launch-pipeline launch`: a program of others with our server as its model, until the program ends."""

import copy
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

import click
from click.core import ParameterSource
from rich.console import Console

from orchestrator.cli.commands.launch.programs import NEED_TOOLS, PROGRAMS, AgentProgram, AskedServer, Invocation
from orchestrator.cli.commands.launch.server import HttpServer, http_server
from orchestrator.cli.commands.serve import serve
from orchestrator.cli.configuration import setting_name
from orchestrator.cli.help import BriefCommand
from orchestrator.cli.pipelines import print_notes, refuse_without_tools
from orchestrator.machine.servers import running_servers
from orchestrator.runtime.session import temporary_folder
from protocol.child_process import module_command
from protocol.errors import InputError, PipelineError
from protocol.paths import SERVERS_VARIABLE, servers_folder
from protocol.security.private_files import write_private

_NOT_OFFERED = ("host", "port", "api_key", "api_key_file", "no_api_key", "for_starter", "help_all")
"""Where the server listens, and for whom, is decided by the other command."""


def serve_options(command: BriefCommand) -> BriefCommand:
    """Adds the options of `serve` that `command` does not have itself, for its command line alone: `serve` reads its
    own settings."""
    own = {parameter.name for parameter in command.params}
    borrowed = [copy.copy(option) for option in _offered() if option.name not in own]
    command.params += borrowed
    command.borrowed = frozenset(setting_name(option) for option in borrowed)
    return command


def serve_words(context: click.Context) -> tuple[str, ...]:
    """The options of `serve` on the command line."""
    words: list[str] = []
    names = {option.name for option in _offered()}
    for option in context.command.params:
        given = context.get_parameter_source(option.name or "") is ParameterSource.COMMANDLINE
        if isinstance(option, click.Option) and option.name in names and given:
            words += _words(option, context.params[option.name])
    return tuple(words)


def _offered() -> Iterator[click.Option]:
    for parameter in serve.params:
        if isinstance(parameter, click.Option) and parameter.name not in _NOT_OFFERED:
            yield parameter


def _words(option: click.Option, value: Any) -> list[str]:
    flag = max(option.opts, key=len)
    if option.is_flag:
        return [flag] if value else list(option.secondary_opts[:1])
    return [word for each in (value if option.multiple else [value]) for word in (flag, str(each))]


_CLOSING_SECONDS = 15.0
_SHOWN_LINES = 10
_OWN = ("--host", "127.0.0.1", "--port", "0", "--for-starter")
_Handler = Callable[[int, FrameType | None], None]
_KEYS = (signal.SIGINT, signal.SIGQUIT)
"""The terminal sends these to the program too, which decides what they mean."""
_ENDINGS = (signal.SIGTERM, signal.SIGHUP)


def run_program(executable: str, program: AgentProgram, server: AskedServer, arguments: Sequence[str]) -> int:
    """Run `program` until it ends, with `server` as its model. Returns its exit code, 128 + N if signal N ended it.

    Raises PipelineError if it can't be started.
    """
    with temporary_folder() as folder:
        invocation = program.settings(server, folder)
        for name, content in invocation.files.items():
            write_private(folder / name, content.encode())
        return _run([executable, *invocation.options, *arguments], invocation, server.address)


def with_settings(environment: Mapping[str, str], settings: Mapping[str, str | None], address: str) -> dict[str, str]:
    """The user's environment with `settings`; `address` is asked directly, also where the user has a proxy."""
    merged = {**environment, **settings}
    host = urlsplit(address).hostname or ""
    if any(name.lower() in ("http_proxy", "all_proxy") for name in environment):
        direct = environment.get("no_proxy") or environment.get("NO_PROXY")
        merged["no_proxy"] = merged["NO_PROXY"] = ",".join(filter(None, (direct, host)))
    return {name: value for name, value in merged.items() if value is not None}


def _run(words: Sequence[str], invocation: Invocation, address: str) -> int:
    environment = with_settings({**invocation.defaults, **os.environ}, invocation.environment, address)
    early: list[int] = []
    passing_on: list[Callable[[int], None]] = [early.append]
    # Handlers, since the program would inherit signals that are ignored.
    endings = dict.fromkeys(_ENDINGS, lambda number, _: passing_on[-1](number))
    with _handled({**dict.fromkeys(_KEYS, lambda *_: None), **endings}):
        try:
            process = subprocess.Popen(words, env=environment)
        except OSError as error:
            raise PipelineError(f"{words[0]} can't be started ({error.strerror}): install it again.") from error
        passing_on.append(process.send_signal)
        for number in early:
            process.send_signal(number)
        code = process.wait()
    return 128 - code if code < 0 else code


@contextmanager
def _handled(handlers: Mapping[int, _Handler]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_POLL_SECONDS = 0.25
_NO_KEY = "unused"
"""Programs refuse to start without a key, also for a server that needs none."""


@serve_options
@click.command(cls=BriefCommand, brief="pair target draft server api-key model preset context")
@click.argument("program", metavar="PROGRAM", type=click.Choice(list(PROGRAMS)))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGUMENTS OF PROGRAM]")
@click.option("--server", metavar="URL", help="The server to ask, for instance http://127.0.0.1:8080.")
@click.option(
    "--api-key", envvar="LAUNCH_PIPELINE_API_KEY", show_envvar=True, help="The key of the server that --server names."
)
@click.option("--model", metavar="NAME", help="The model to ask for, as the server calls it. Default: its first one.")
def launch(
    program: str,
    arguments: tuple[str, ...],
    server: str | None,
    api_key: str | None,
    model: str | None,
    **_: Any,
) -> None:
    """Run an agent or editor in the terminal, with this pipeline as its model.

    The server is one that you run already. If there is none, or an option of `serve` is given, one is started, and
    ends with the program. The program's own settings stay as they are; the server is set for this process alone.

    \b
    launch-pipeline launch codex
    launch-pipeline launch claude --pair qwen2.5-3b -- -p "What is this?"
    """
    # Not as an argument: the pipeline has an option --context.
    context = click.get_current_context()
    chosen = PROGRAMS[program]
    executable = shutil.which(chosen.command)
    if executable is None:
        raise PipelineError(f"{chosen.command} is not installed: run `{chosen.install}`, then try again.")
    with ExitStack() as stack:
        found = _named(context, server, api_key) or _running(serve_words(context), model)
        try:
            asked = found or stack.enter_context(_own_server(context, program))
        except ServerEnded as ended:
            sys.exit(ended.code)
        facts = _facts(asked, model)
        if program in NEED_TOOLS and not facts.knows_tools:
            refuse_without_tools(program, facts.model)
        print_notes([f"{program} asks {facts.model} at {facts.address}."])
        code = run_program(executable, chosen, facts, arguments)
    sys.exit(code)


def _named(context: click.Context, address: str | None, key: str | None) -> HttpServer | None:
    """The server that the user names. Raises InputError for options of another one beside it."""
    if address is None:
        return None
    words = serve_words(context)
    if words:
        raise InputError(f"--server names a server that runs, so {words[0]} has no effect: leave one of them out.")
    return http_server(address, key)


def _running(words: tuple[str, ...], model: str | None) -> HttpServer | None:
    """The latest server of this user that answers and has `model`; none if an option says what a server must be."""
    if words:
        return None
    for running in running_servers(servers_folder()):
        server = HttpServer(running.address, running.key)
        with suppress(PipelineError):
            if server.state() in ("ok", "degraded", "loading") and (model is None or model in server.models()):
                return server
    return None


def _facts(server: HttpServer, model: str | None) -> AskedServer:
    """Waits until the model is loaded. Raises InputError if the server has no `model`, PipelineError if it can't serve
    it."""
    with Console(stderr=True).status("Loading models ..."):
        while not server.ready():
            time.sleep(_POLL_SECONDS)
        models = server.models()
        if model is not None and model not in models:
            raise InputError(
                f"The server has no model {model!r} (it has {', '.join(models)}): see --target, or --pair."
            )
        name = model or models[0]
        # First, since a server with several models loads this one for it, and then knows its context.
        knows_tools = server.knows_tools(name)
    return AskedServer(
        address=server.address,
        key=server.key or _NO_KEY,
        model=name,
        context=server.context(name),
        knows_tools=knows_tools,
    )


class ServerEnded(Exception):
    """The server ended while it started, and has said why on standard error."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


@contextmanager
def _own_server(context: click.Context, program: str) -> Iterator[HttpServer]:
    """The context of `serve` with the options in `context`, in a process of its own, on a free port of loopback, with a
    key of its own. Raises ServerEnded if it does not get so far.

    While models load, the server tells of it on standard error. What it writes later is shown when the context ends.
    """
    configuration = context.find_root().meta.get("configuration")
    given = ("--config", str(configuration)) if configuration else ()
    needs = program if program in NEED_TOOLS else ""
    with temporary_folder() as folder:
        log = folder / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*module_command("orchestrator.cli.entry"), *given, "serve", *_OWN, needs, *serve_words(context)],
                env={**os.environ, SERVERS_VARIABLE: str(folder)},
                stdin=subprocess.PIPE,
                stdout=output,
                # Ctrl-C is the program's.
                start_new_session=True,
            )
        told = ""
        try:
            print_notes(["Loading models ..."])
            yield _ready(process, folder)
            told = log.read_text(errors="replace")
        finally:
            _end(process)
        print_notes(_later(told))


def _ready(process: subprocess.Popen[bytes], folder: Path) -> HttpServer:
    server: HttpServer | None = None
    while (code := process.poll()) is None:
        if server is None:
            server = next((HttpServer(found.address, found.key) for found in running_servers(folder)), None)
        elif server.ready():
            _silence(process)
            return server
        time.sleep(_POLL_SECONDS)
    raise ServerEnded(code)


def _silence(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.write(b"\n")
        process.stdin.flush()


def _later(told: str) -> list[str]:
    lines = told.splitlines()
    return lines if len(lines) <= _SHOWN_LINES else ["...", *lines[-_SHOWN_LINES:]]


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    _silence(process)
    with suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(_CLOSING_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
