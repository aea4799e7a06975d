"""The key of a service: which options name it, and the file that keeps it. A service gets no key from its environment.

The configuration is read at each start of the service, so a setting about the key that is in force there stays there.
"""

import os
from pathlib import Path

import click
from click.core import ParameterSource

from orchestrator.cli.configuration import origin
from orchestrator.cli.serving.server_key import server_key
from protocol.errors import InputError
from protocol.paths import keys_folder

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
        _write_private(kept, key)
    return ("--api-key-file", str(kept))


def _refuse_second(parsed: click.Context) -> None:
    """The environment, which the service does not have, overrules the configuration now, which the service reads."""
    for option in parsed.command.params:
        if option.name in (_KEY, _NO_KEY) and (parsed.default_map or {}).get(option.name):
            raise InputError(
                f"{origin(parsed, option)} is set, and the configuration has {option.name.replace('_', '-')}, which "
                "the service would read beside it: unset the variable, or take the line out of the configuration."
            )


def _write_private(file: Path, text: str) -> None:
    """Only this user can read it, from the first moment on."""
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    file.unlink(missing_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
        opened.write(f"{text}\n")
