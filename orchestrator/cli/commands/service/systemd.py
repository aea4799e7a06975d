"""The service as a systemd unit of this user: systemd.service(5), systemd.syntax(7), systemctl(1)."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from orchestrator.cli.commands.service.definition import ServiceDefinition, ServiceState
from orchestrator.cli.commands.service.programs import require, run
from protocol.errors import InputError

NAME = "launch-pipeline.service"
_OURS = "Arguments="
_NO_BUS = (
    "a user's service needs systemd and a session of this user (over SSH: sudo loginctl enable-linger $USER, then log "
    "in again)"
)


class SystemdUnit:
    """`configuration`: the user's folder for configuration files; `systemctl`: the program."""

    def __init__(self, configuration: Path, systemctl: str = "systemctl") -> None:
        self._file = configuration / "systemd" / "user" / NAME
        self._systemctl = systemctl

    def require_available(self) -> None:
        require([self._systemctl, "--user", "show-environment"], _NO_BUS)

    def install(self, definition: ServiceDefinition) -> None:
        text = unit(definition)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(text)
        for words in (["daemon-reload"], ["enable", NAME], ["restart", NAME]):
            require([self._systemctl, "--user", *words], _NO_BUS)

    def remove(self) -> bool:
        if not self._file.exists():
            return False
        require([self._systemctl, "--user", "disable", "--now", NAME], _NO_BUS)
        self._file.unlink()
        require([self._systemctl, "--user", "daemon-reload"], _NO_BUS)
        # Fails if the service has not failed.
        run([self._systemctl, "--user", "reset-failed", NAME])
        return True

    def state(self) -> ServiceState:
        absent = ServiceState(definition=str(self._file), log=f"journalctl --user -u {NAME}")
        if not self._file.is_file():
            return absent
        shown = run([self._systemctl, "--user", "show", NAME, "--property=ActiveState,MainPID"])
        facts = dict(line.split("=", 1) for line in shown.stdout.splitlines() if "=" in line)
        running = facts.get("ActiveState") == "active"
        ours = [line for line in self._file.read_text().splitlines() if line.startswith(_OURS)]
        return replace(
            absent,
            installed=True,
            process=int(facts["MainPID"]) if running else None,
            arguments=tuple(json.loads(ours[-1].removeprefix(_OURS))) if ours else (),
        )


def unit(definition: ServiceDefinition) -> str:
    """The unit file. systemd ignores sections that begin with X-; ours has the arguments as JSON.

    Raises InputError for a line break in a value, which a unit file can't hold.
    """
    command = " ".join(_quoted(word).replace("$", "$$") for word in (*definition.program, *definition.arguments))
    environment = (f"Environment={_quoted(f'{name}={value}')}" for name, value in definition.environment.items())
    return _lines(
        [
            "# Written by `launch-pipeline service install`; `launch-pipeline service remove` deletes it.",
            "[Unit]",
            "Description=launch-pipeline serve",
            "",
            "[Service]",
            "Type=exec",
            f"ExecStart={command}",
            f"WorkingDirectory={definition.folder.replace('%', '%%')}",
            *environment,
            "Restart=on-failure",
            "RestartSec=5",
            "# A mistake in the options does not go away by itself.",
            "RestartPreventExitStatus=2",
            "SuccessExitStatus=130",
            "# The server ends its own processes.",
            "KillMode=mixed",
            "UMask=0077",
            "",
            "[Install]",
            "WantedBy=default.target",
            "",
            "[X-launch-pipeline]",
            f"{_OURS}{json.dumps(definition.arguments)}",
        ]
    )


def _quoted(word: str) -> str:
    """One word, in systemd.syntax's double quotes; % begins a specifier."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'


def _lines(lines: Iterable[str]) -> str:
    found = list(lines)
    if any("\n" in line or "\r" in line for line in found):
        raise InputError("A service's options, its folder and its environment must have no line breaks: change them.")
    return "\n".join(found) + "\n"
