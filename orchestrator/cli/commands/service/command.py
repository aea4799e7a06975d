"""`launch-pipeline service`: `serve` at each login, by the system's service manager."""

import dataclasses
import json
import os
import sys
from pathlib import Path

import click

from orchestrator.cli.commands.serve import serve
from orchestrator.cli.commands.service.definition import ServiceDefinition, ServiceManager
from orchestrator.cli.commands.service.launchd import LaunchAgent
from orchestrator.cli.commands.service.rotated_log import run_logged
from orchestrator.cli.commands.service.start_command import kept_environment, protected_folder, start_command
from orchestrator.cli.commands.service.systemd import SystemdUnit
from orchestrator.cli.pipelines import print_notes
from orchestrator.cli.serving.service_key import key_options, service_key_file
from protocol.errors import InputError, PipelineError
from protocol.paths import config_file

_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


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
    service_key_file().unlink(missing_ok=True)
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
            *key_options(parsed),
            *options,
        ),
        folder=str(Path.cwd()),
        environment=kept_environment(os.environ),
    )


def _tell(manager: ServiceManager, as_json: bool) -> None:
    state = manager.state()
    address = _address(state.arguments)
    key = str(service_key_file()) if str(service_key_file()) in state.arguments else ""
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
