"""Looks at a pipeline's processes from outside: the drills' own means, for tests."""

from orchestrator import Pipeline
from orchestrator.lab.drill import processes
from orchestrator.lab.drill.processes import members, remains, state, until

__all__ = ["mark", "members", "remains", "state", "until"]


def mark(pipeline: Pipeline) -> str:
    """What the command lines of this pipeline's processes, and of no others, contain: its session folder."""
    return processes.mark(pipeline.address)
