"""Looks at a pipeline's processes from outside: the drills' own means, for tests."""

import os
import signal
from collections.abc import Callable, Sequence

from orchestrator import Pipeline, Result, SamplingParams
from orchestrator.lab.drill import processes
from orchestrator.lab.drill.processes import members, remains, state, until

__all__ = ["generate_while", "mark", "members", "remains", "shoot", "state", "until"]


def mark(pipeline: Pipeline) -> str:
    """What the command lines of this pipeline's processes, and of no others, contain: its session folder."""
    return processes.mark(pipeline.address)


def shoot(pipeline: Pipeline, program: str, kind: signal.Signals = signal.SIGKILL) -> int:
    """Send a signal to a process of the pipeline, once it is there; its process id."""
    pid = until(lambda: members(mark(pipeline)).get(program))
    os.kill(pid, kind)
    return pid


def generate_while(
    pipeline: Pipeline, prompt: str | Sequence[int], params: SamplingParams, after: int, happens: Callable[[], object]
) -> Result:
    """The result of a request during which, behind so many pieces of text, something happens."""
    with pipeline.stream(prompt, params) as stream:
        for count, _ in enumerate(stream):
            if count == after:
                happens()
        assert stream.result is not None
        return stream.result
