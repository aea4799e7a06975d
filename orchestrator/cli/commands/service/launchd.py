"""The service as a LaunchAgent of this user: launchd.plist(5) and launchctl(1) of macOS."""

import os
import plistlib
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestrator.cli.commands.service.definition import ServiceDefinition, ServiceState
from orchestrator.cli.commands.service.programs import require, run

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
    """`launchctl`: the program; `user`: whose agents; `pause`: waits so many seconds."""

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
