"""Commands that keep a Mac awake while they run."""

import functools
from collections.abc import Callable
from typing import Any

from orchestrator.cli.pipelines import print_notes
from orchestrator.machine.idle_sleep import without_idle_sleep


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
