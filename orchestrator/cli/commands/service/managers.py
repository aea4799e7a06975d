"""The service managers of macOS and Linux, and what a service is started with.

launchd.plist(5) and launchctl(1); systemd.service(5), systemd.syntax(7) and systemctl(1).
"""

import json
import os
import plistlib
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from protocol.errors import PipelineError


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceDefinition:
    """A service; everyone on this machine may be able to read it, so nothing here is secret."""

    program: tuple[str, ...]
    """What starts launch-pipeline, with an absolute path."""
    arguments: tuple[str, ...]
    """Those of launch-pipeline, the command first."""
    folder: str
    """Where it runs: relative paths among the arguments mean what they meant to the user."""
    environment: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceState:
    definition: str
    """The file that defines the service."""
    log: str
    """The file that has the service's output, or the command that shows it."""
    installed: bool = False
    process: int | None = None
    """Of the running service."""
    arguments: tuple[str, ...] = ()
    """As in its definition."""


_BY_HAND = "`launch-pipeline serve` runs in a terminal all the same"


def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Its exit code and its words. Raises PipelineError if there is no such program."""
    try:
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    except OSError as error:
        raise PipelineError(f"{command[0]} can't be started ({error.strerror}): {_BY_HAND}.") from error


def require(command: Sequence[str], next_step: str) -> None:
    """Raises PipelineError with the program's last line and `next_step` if it refuses."""
    done = run(command)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or [f"exit code {done.returncode}"]
        raise PipelineError(f"`{' '.join(command)}` failed ({lines[-1].strip().rstrip('.')}): {next_step}.")


NAME = "launch-pipeline.service"
_OURS = "Arguments="
_NO_BUS = (
    "a user's service needs systemd and a session of this user (over SSH: sudo loginctl enable-linger $USER, then log "
    "in again)"
)


class SystemdUnit:
    """`configuration`: the user's folder for configuration files; `systemctl`: the program. `require_available` writes
    nothing, so that `install` need not be taken back; `install` starts the service now and at each login, in place of
    one that is installed; `remove` stops it and deletes all that `install` wrote, False if nothing was installed."""

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
    """The unit file. systemd ignores sections that begin with X-; ours has the arguments as JSON."""
    command = " ".join(_quoted(word).replace("$", "$$") for word in (*definition.program, *definition.arguments))
    environment = (f"Environment={_quoted(f'{name}={value}')}" for name, value in definition.environment.items())
    return "\n".join(
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
            "",
        ]
    )


def _quoted(word: str) -> str:
    """One word, in systemd.syntax's double quotes; % begins a specifier."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'


LABEL = "launch-pipeline.serve"
_RESTART_SECONDS = 10
_PRIVATE = 0o077
_TRIES = 31
"""One a second, for half a minute: `serve` may take 10 s to end."""
_LOGIN = "a LaunchAgent needs a user who is logged in at the screen, so run this in Terminal there"
_ENDING = (
    "a service that is replaced may still be ending, so run `launch-pipeline service install` again in a minute; if "
    "that fails too, see whether System Settings, General, Login Items allows launch-pipeline in the background"
)


class LaunchAgent:
    """The methods of SystemdUnit. `launchctl`: the program; `user`: whose agents; `pause`: waits so many seconds."""

    def __init__(
        self,
        home: Path,
        launchctl: str = "/bin/launchctl",
        user: int | None = None,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._file = home / "Library" / "LaunchAgents" / f"{LABEL}.plist"
        self._logs = home / "Library" / "Logs" / "launch-pipeline"
        self._launchctl = launchctl
        self._domain = f"gui/{os.getuid() if user is None else user}"
        self._pause = pause

    def require_available(self) -> None:
        require([self._launchctl, "print", self._domain], _LOGIN)

    def install(self, definition: ServiceDefinition) -> None:
        self._unload()
        self._logs.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_bytes(plistlib.dumps(property_list(definition, self._log)))
        self._load()

    def remove(self) -> bool:
        self._unload()
        found = self._file.exists()
        self._file.unlink(missing_ok=True)
        for log in self._logs.glob(f"{self._log.name}*"):
            log.unlink(missing_ok=True)
        if self._logs.is_dir() and not any(self._logs.iterdir()):
            self._logs.rmdir()
        return found

    def state(self) -> ServiceState:
        absent = ServiceState(definition=str(self._file), log=str(self._log))
        if not self._file.is_file():
            return absent
        shown = run([self._launchctl, "print", self._target])
        process = re.search(r"^\s*pid = (\d+)$", shown.stdout, re.MULTILINE) if shown.returncode == 0 else None
        words = plistlib.loads(self._file.read_bytes())["ProgramArguments"]
        return replace(
            absent,
            installed=True,
            process=int(process[1]) if process else None,
            arguments=tuple(words[words.index("--") + 1 :]),
        )

    @property
    def _log(self) -> Path:
        return self._logs / "serve.log"

    @property
    def _target(self) -> str:
        return f"{self._domain}/{LABEL}"

    def _load(self) -> None:
        """An agent that is just being unloaded can't be loaded yet: launchctl then fails with error 5 or 37."""
        command = [self._launchctl, "bootstrap", self._domain, str(self._file)]
        for _ in range(_TRIES - 1):
            if run(command).returncode == 0:
                return
            self._pause(1.0)
        require(command, _ENDING)

    def _unload(self) -> None:
        """launchctl fails if it is not loaded, and then there is nothing to do."""
        run([self._launchctl, "bootout", self._target])


def property_list(definition: ServiceDefinition, log: Path) -> dict[str, Any]:
    """launchd writes no output in turns of files, so the command `service run` does, which keeps `log` small.

    KeepAlive: started again unless it ends with exit code 0, as after a mistake in its options.
    """
    return {
        "Label": LABEL,
        "ProgramArguments": [*definition.program, "service", "run", "--log", str(log), "--", *definition.arguments],
        "WorkingDirectory": definition.folder,
        "EnvironmentVariables": dict(definition.environment),
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": _RESTART_SECONDS,
        # Otherwise macOS slows its processor time and its disk as a background task's.
        "ProcessType": "Interactive",
        "Umask": _PRIVATE,
    }


ServiceManager: TypeAlias = LaunchAgent | SystemdUnit
"""Raises PipelineError if the system's program is absent or refuses."""
