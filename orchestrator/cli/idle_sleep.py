"""Commands that keep a Mac awake while they run."""

import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from orchestrator.cli.pipelines import print_notes

_CAFFEINATE = "/usr/bin/caffeinate"


@contextmanager
def without_idle_sleep(system: str = sys.platform, program: str = _CAFFEINATE) -> Iterator[str]:
    """The context of work that should not be interrupted. Yields a sentence if sleep can't be prevented, else "".

    caffeinate(8): -i prevents idle sleep; -w ends with the process of that number, so that nothing is left if this
    process is killed.
    """
    if system != "darwin":
        yield ""
        return
    try:
        assertion = subprocess.Popen(
            [program, "-i", "-w", str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # Ctrl-C in the terminal is for this process, which may still have to end its work.
            start_new_session=True,
        )
    except OSError as error:
        yield f"This Mac may fall asleep meanwhile ({program}: {error.strerror})."
        return
    try:
        yield ""
    finally:
        assertion.terminate()
        assertion.wait()


def stays_awake(command: Callable[..., Any]) -> Callable[..., Any]:
    """The function of a command that works for minutes or longer."""

    @functools.wraps(command)
    def awake(*arguments: Any, **options: Any) -> Any:
        with without_idle_sleep() as note:
            print_notes([note])
            return command(*arguments, **options)

    # Decorators keep it, so that a command tells whether it does.
    awake.__dict__["stays_awake"] = True
    return awake
