"""Runs a command whose output goes to a log file that stays small. launchd appends to one file for ever."""

import logging
import signal
import subprocess
from collections.abc import Sequence
from logging.handlers import RotatingFileHandler
from pathlib import Path

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
    file.parent.mkdir(parents=True, exist_ok=True)
    handler = RotatingFileHandler(file, maxBytes=size, backupCount=kept, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log = logging.Logger("service", logging.INFO)
    log.addHandler(handler)
    return log
