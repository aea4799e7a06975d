"""`launch-pipeline service`: `serve` at each login, by the system's service manager."""

import dataclasses
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from logging.handlers import RotatingFileHandler
from pathlib import Path

import click
from click.core import ParameterSource

from orchestrator.cli.commands.serve import serve, server_key
from orchestrator.cli.commands.service.managers import LaunchAgent, ServiceDefinition, ServiceManager, SystemdUnit
from orchestrator.cli.configuration import origin
from orchestrator.cli.help import Group
from orchestrator.cli.pipelines import print_notes
from orchestrator.cli.sentences import say
from protocol.child_process import module_command
from protocol.errors import InputError, PipelineError
from protocol.paths import config_file, keys_folder
from protocol.security.private_files import write_private

_KEY, _NO_KEY, _FILE = "api_key", "no_api_key", "api_key_file"


def service_key_file() -> Path:
    return keys_folder().parent / "service-api-key"


def key_options(parsed: click.Context) -> tuple[str, ...]:
    """Options of `serve`, which `parsed` is a call of, with which it finds the same key or none at each start.

    A key of the environment, or one that is made, is written to the service's file. A service that is installed again
    keeps its key, since clients have it. Raises InputError for what `serve` would refuse, and for a key that the
    service could not have.
    """
    if parsed.get_parameter_source(_KEY) is ParameterSource.COMMANDLINE:
        raise InputError(
            "Every program can read a service's options, so --api-key can't be one: leave it out, and a key is made, "
            "or set LAUNCH_PIPELINE_API_KEY while you install."
        )
    values, kept = parsed.params, service_key_file()
    in_force = next((name for name in (_NO_KEY, _FILE, _KEY) if values[name] not in (None, False)), "")
    again = not in_force and kept.is_file()
    key, _ = server_key(values[_KEY], kept if again else values[_FILE], values[_NO_KEY], values["host"])
    if parsed.get_parameter_source(in_force) is ParameterSource.DEFAULT_MAP:
        return ()
    if key is None:
        return ("--no-api-key",)
    if in_force == _FILE:
        return ("--api-key-file", str(values[_FILE].absolute()))
    _refuse_second(parsed)
    if not again:
        kept.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_private(kept, f"{key}\n".encode())
    return ("--api-key-file", str(kept))


def _refuse_second(parsed: click.Context) -> None:
    """The environment, which the service does not have, overrules the configuration now, which the service reads."""
    for option in parsed.command.params:
        if option.name in (_KEY, _NO_KEY) and (parsed.default_map or {}).get(option.name):
            raise InputError(
                f"{origin(parsed, option)} is set, and the configuration has {option.name.replace('_', '-')}, which "
                "the service would read beside it: unset the variable, or take the line out of the configuration."
            )


BYTES = 1 << 20
KEPT = 3
_WRONG_INPUT = 2


def run_logged(command: Sequence[str], file: Path, size: int = BYTES, kept: int = KEPT) -> int:
    """The exit code of the command, whose output goes to `file`, each line with the time.

    Beyond `size` bytes a new file is begun and `kept` old ones stay. An interrupt is passed on, and the end awaited.
    A mistake in the command's input becomes exit code 0: a service manager should not try again.
    """
    log = _log(file, size, kept)
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    while True:
        try:
            code = _copied(process, log)
            break
        except KeyboardInterrupt:
            process.send_signal(signal.SIGTERM)
    log.info("The service ended with exit code %d.", code)
    return 0 if code == _WRONG_INPUT else code


def _copied(process: subprocess.Popen[str], log: logging.Logger) -> int:
    """Copy what is left of the output; return the exit code."""
    assert process.stdout is not None
    for line in process.stdout:
        log.info("%s", line.rstrip("\n"))
    return process.wait()


def _log(file: Path, size: int, kept: int) -> logging.Logger:
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handler = RotatingFileHandler(file, maxBytes=size, backupCount=kept, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log = logging.Logger("service", logging.INFO)
    log.addHandler(handler)
    return log


_KEPT = ("PATH", "HF_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME")
"""A service manager passes on little: where programs, models and settings are must be the user's."""
_PREFIX = "LAUNCH_PIPELINE_"
_UNWRITABLE = re.compile("[\x00-\x08\x0a-\x1f\x7f\ud800-\udfff]")
_KEY_PART = "KEY"
"""Part of the names of variables that hold secrets, which are not passed on."""


def start_command(started: str = sys.argv[0]) -> tuple[str, ...]:
    """The installed command or the checkout's, by a path that stays valid if it is updated."""
    path = Path(started).absolute()
    if path.name == ".start.py":
        return (str(path.parent / "launch-pipeline"),)
    if path.name == "launch-pipeline" and os.access(path, os.X_OK):
        return (str(path),)
    return module_command("orchestrator.cli.entry")


def kept_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """What a service needs of `variables`, without keys: a definition is no place for them."""
    return {
        name: value
        for name, value in sorted(variables.items())
        if name in _KEPT or (name.startswith(_PREFIX) and _KEY_PART not in name.split("_"))
    }


def protected_folder(folders: tuple[str, ...], home: Path) -> str:
    """The one of `folders` that macOS opens to no LaunchAgent: below Desktop, Documents, Downloads or iCloud Drive."""
    closed = [home / name for name in ("Desktop", "Documents", "Downloads", "Library/Mobile Documents")]
    return next((each for each in folders if any(Path(each).is_relative_to(folder) for folder in closed)), "")


_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


@click.group(cls=Group)
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
        say("Removed." if found else "No service is installed.")


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
    program, folder, environment = start_command(), str(Path.cwd()), kept_environment(os.environ)
    _require_writable((*program, *options, *environment.values()), folder)
    parsed = serve.make_context("serve", list(options), parent=root)
    values = parsed.params
    if values["port"] == 0:
        raise InputError("A service needs a port that stays the same: choose one with --port.")
    configuration = root.meta.get("configuration")
    return ServiceDefinition(
        program=program,
        arguments=(
            *(("--config", str(Path(configuration).absolute())) if configuration else ()),
            *("serve", "--host", values["host"], "--port", str(values["port"])),
            *key_options(parsed),
            *options,
        ),
        folder=folder,
        environment=environment,
    )


def _require_writable(words: Sequence[str], folder: str) -> None:
    """Raises InputError for text that a definition can't hold on one of the systems."""
    # A unit goes on in the next line behind a backslash.
    if any(map(_UNWRITABLE.search, (*words, folder))) or folder.endswith("\\"):
        raise InputError(
            "A service's options, its folder and its environment must have no line breaks, no control characters, no "
            "bytes that are no text, and no backslash at the folder's end: put long values into the configuration "
            "file, and change others."
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
        say("No service is installed: `launch-pipeline service install` installs one.")
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
