"""`launch-pipeline launch`: a program of others with our server as its model, until the program ends."""

import shutil
import sys
import time
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import Any

import click
from rich.console import Console

from orchestrator.cli.commands.launch.invocation import AgentProgram, ModelServer
from orchestrator.cli.commands.launch.own_server import ServerEnded, own_server
from orchestrator.cli.commands.launch.process import run_program
from orchestrator.cli.commands.launch.programs import PROGRAMS
from orchestrator.cli.commands.launch.serve_options import ServeSettings, serve_options, serve_settings
from orchestrator.cli.commands.launch.server import HttpServer, http_server
from orchestrator.cli.pipelines import print_notes
from orchestrator.machine.running_servers import running_servers
from protocol.errors import InputError, PipelineError
from protocol.paths import servers_folder

_POLL_SECONDS = 0.25
_NO_KEY = "unused"
"""Programs refuse to start without a key, also for a server that needs none."""


@serve_options
@click.command()
@click.argument("program", type=click.Choice(list(PROGRAMS)))
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
    launch-pipeline launch claude --pair qwen2.5-3b -- -p "What does this project do?"
    """
    # Not as an argument: the pipeline has an option --context.
    context = click.get_current_context()
    chosen = PROGRAMS[program]
    executable = shutil.which(chosen.command)
    if executable is None:
        raise PipelineError(f"{chosen.command} is not installed: run `{chosen.install}`, then try again.")
    with ExitStack() as stack:
        found = _named(context, server, api_key) or _running(serve_settings(context), model)
        try:
            asked = found or stack.enter_context(_own(context))
        except ServerEnded as ended:
            sys.exit(ended.code)
        facts = _facts(asked, model)
        print_notes([f"{program} asks {facts.model} at {facts.address}.", _tools_note(chosen, facts)])
        code = run_program(executable, chosen, facts, arguments)
    sys.exit(code)


def _named(context: click.Context, address: str | None, key: str | None) -> HttpServer | None:
    """The server that the user names. Raises InputError for options of another one beside it."""
    if address is None:
        return None
    words = serve_settings(context).words
    if words:
        raise InputError(f"--server names a server that runs, so {words[0]} has no effect: leave one of them out.")
    return http_server(address, key)


def _running(settings: ServeSettings, model: str | None) -> HttpServer | None:
    """The latest server of this user that answers and has `model`; none if an option says what a server must be."""
    if settings.words:
        return None
    for running in running_servers(servers_folder()):
        server = HttpServer(running.address, running.key)
        with suppress(PipelineError):
            if server.state() in ("ok", "degraded", "loading") and (model is None or model in server.models()):
                return server
    return None


def _own(context: click.Context) -> AbstractContextManager[HttpServer]:
    return own_server(serve_settings(context), context.find_root().meta.get("configuration"))


def _facts(server: HttpServer, model: str | None) -> ModelServer:
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
    return ModelServer(
        address=server.address,
        key=server.key or _NO_KEY,
        model=name,
        context=server.context(name),
        knows_tools=knows_tools,
    )


def _tools_note(program: AgentProgram, server: ModelServer) -> str:
    if server.knows_tools or not program.offers_tools:
        return ""
    return (
        f"The chat template of {server.model} knows no tools, so requests with tools, which {program.command} sends "
        "unless told otherwise, are refused: choose a model that was trained on tools, see `launch-pipeline pairs`."
    )
