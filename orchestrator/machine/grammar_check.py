"""Whether a grammar can be enforced, asked in a process of its own.

A client's schema is a program for a library in another language, whose faults would end the server with it. Here they
end that process. It starts with the first grammar.
"""

import threading
from collections.abc import Sequence
from functools import lru_cache

import msgspec

from protocol.bounded_process import BoundedProcesses, BoundExceeded, Bounds, answer_questions
from protocol.child_process import module_command
from protocol.errors import InputError
from protocol.messages.grammar import Grammar

_BOUNDS = Bounds(seconds=3, memory=1 << 30)
"""The largest honest schemas take 0.3 s."""


def checking(command: Sequence[str]) -> BoundedProcesses:
    return BoundedProcesses(command, _BOUNDS, {"OPENBLAS_NUM_THREADS": "1"})


_turn = threading.Lock()
_processes = checking(module_command(__name__))


@lru_cache(maxsize=64)
def _flaw(grammar: Grammar) -> str | None:
    with _turn:
        return flaw_found_by(_processes, grammar)


def flaw_found_by(processes: BoundedProcesses, grammar: Grammar) -> str | None:
    """Why this grammar can't be enforced, as a sentence; None if it can. Raises PipelineError if nobody can say."""
    try:
        return msgspec.json.decode(processes.ask(grammar), type=str | None)
    except BoundExceeded as exceeded:
        return f"This JSON schema can't be enforced: its check {exceeded}."


def require_enforceable(grammar: Grammar | None) -> None:
    """Raise InputError if the grammar can't be enforced."""
    reason = None if grammar is None else _flaw(grammar)
    if reason is not None:
        raise InputError(reason)


def main() -> None:
    """For each grammar the reason or null."""
    from protocol.sampling.grammar import flaw

    answer_questions(lambda line: flaw(msgspec.json.decode(line, type=Grammar)), _BOUNDS)


if __name__ == "__main__":
    main()
