"""`launch-pipeline service`: `serve` at each login, by the system's service manager."""

import dataclasses
import json
import os
import sys
from pathlib import Path

import click
from click.core import ParameterSource

from orchestrator.cli.commands.serve import serve
from orchestrator.cli.pipelines import print_notes
from orchestrator.http.settings import fresh_key
from orchestrator.tools.service.definition import ServiceDefinition, ServiceManager
from orchestrator.tools.service.launchd import LaunchAgent
from orchestrator.tools.service.rotated_log import run_logged
from orchestrator.tools.service.start_command import kept_environment, protected_folder, start_command
from orchestrator.tools.service.systemd import SystemdUnit
from protocol.errors import InputError, PipelineError
from protocol.paths import config_file, keys_folder

_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
_KEY = "api_key"


@click.group()
def service() -> None:
    """Run `serve` in the background, from each login on."""


@service.command()
@click.argument("options", nargs=-1, type=click.UNPROCESSED, metavar="[-- OPTIONS OF SERVE]")
@_JSON
@click.pass_context
def install(context: click.Context, options: tuple[str, ...], as_json: bool) -> None:
    """Start `serve` with these options now and at each login; a service that is installed is replaced.

    Clients' key is kept in a file that only this user can read.

    \b
    launch-pipeline service install -- --pair qwen2.5-3b --port 8080
    """
    manager = service_manager()
    manager.require_available()
    definition = _definition(context.find_root(), options)
    manager.install(definition)
    if sys.platform == "darwin":
        closed = protected_folder((definition.folder, definition.program[0]), Path.home())
        if closed:
            print_notes(
                [f"macOS may not let a service read {closed}: move it elsewhere if the service does not start."]
            )
    _tell(manager, as_json)


@service.command()
@_JSON
def status(as_json: bool) -> None:
    """Say whether the service runs, at which address, and where its output is."""
    _tell(service_manager(), as_json)


@service.command()
@_JSON
def remove(as_json: bool) -> None:
    """Stop the service, and delete its definition, its key and its output."""
    found = service_manager().remove()
    _key_file().unlink(missing_ok=True)
    if as_json:
        click.echo(json.dumps({"removed": found}))
    else:
        click.echo("Removed." if found else "No service is installed.")


@service.command("run", hidden=True)
@click.option("--log", type=click.Path(path_type=Path, dir_okay=False), required=True)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run_command(log: Path, arguments: tuple[str, ...]) -> None:
    """Run launch-pipeline with ARGUMENTS, and keep its output in files of limited size. LaunchAgents start this."""
    sys.exit(run_logged([*start_command(), *arguments], log))


def service_manager(system: str = sys.platform) -> ServiceManager:
    """Of this system, for this user. Raises PipelineError if there is none."""
    if system == "darwin":
        return LaunchAgent(Path.home())
    if system == "linux":
        return SystemdUnit(config_file().parent.parent)
    raise PipelineError(f"There are no services on {system}: run `launch-pipeline serve` in a terminal.")


def _definition(root: click.Context, options: tuple[str, ...]) -> ServiceDefinition:
    """Raises InputError for what a service can't have, and click's errors for options that `serve` does not take."""
    if any("\n" in option or "\r" in option for option in options):
        raise InputError("A service's options must have no line breaks: put long values into the configuration file.")
    parsed = serve.make_context("serve", list(options), parent=root)
    values = parsed.params
    if values["port"] == 0:
        raise InputError("A service needs a port that stays the same: choose one with --port.")
    configuration = root.meta.get("configuration")
    return ServiceDefinition(
        program=start_command(),
        arguments=(
            *(("--config", str(Path(configuration).absolute())) if configuration else ()),
            *("serve", "--host", values["host"], "--port", str(values["port"])),
            *_key_options(parsed),
            *options,
        ),
        folder=str(Path.cwd()),
        environment=kept_environment(os.environ),
    )


def _key_options(parsed: click.Context) -> tuple[str, ...]:
    """Options that name the file with the key. It is made now, with the environment's key if there is one.

    A service that is installed again keeps its key, since clients have it.
    """
    source, key = parsed.get_parameter_source(_KEY), parsed.params[_KEY]
    if source is ParameterSource.COMMANDLINE:
        raise InputError(
            "Every program can read a service's options, so --api-key can't be one: leave it out, and a key is made, "
            "or set LAUNCH_PIPELINE_API_KEY while you install."
        )
    given = parsed.params["no_api_key"] or parsed.params["api_key_file"] is not None
    if given or source is ParameterSource.DEFAULT_MAP:
        return ()
    file = _key_file()
    if key is not None or not file.is_file():
        _write_private(file, key or fresh_key())
    return ("--api-key-file", str(file))


def _key_file() -> Path:
    return keys_folder().parent / "service-api-key"


def _write_private(file: Path, text: str) -> None:
    """Only this user can read it, from the first moment on."""
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    file.unlink(missing_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
        opened.write(f"{text}\n")


def _tell(manager: ServiceManager, as_json: bool) -> None:
    state = manager.state()
    address = _address(state.arguments)
    key = str(_key_file()) if str(_key_file()) in state.arguments else ""
    if as_json:
        found = dataclasses.asdict(state) | {"running": state.process is not None, "address": address, "key_file": key}
        click.echo(json.dumps(found))
        return
    if not state.installed:
        click.echo("No service is installed: launch-pipeline service install")
        return
    click.echo(f"running, process {state.process}" if state.process else "installed, not running")
    rows = {"address": address, "key": f"in {key}" if key else "", "log": state.log, "definition": state.definition}
    for name, value in rows.items():
        if value:
            click.echo(f"{name:<11}{value}")


def _address(arguments: tuple[str, ...]) -> str:
    """Of the API, from a definition's arguments, which name host and port right after the command."""
    if "serve" not in arguments:
        return ""
    _, _, host, _, port = arguments[arguments.index("serve") :][:5]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
