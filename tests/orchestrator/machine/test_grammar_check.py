"""Laws of the process that checks grammars: what ends it, or takes its time or memory, ends nothing else."""

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from orchestrator.machine.grammar_check import checking, flaw_found_by
from protocol.bounded_process import BoundedProcesses
from protocol.errors import PipelineError
from protocol.messages.grammar import Grammar

MAIN = "from orchestrator.machine import grammar_check; grammar_check.main()"
FAULTY = f"from protocol.sampling import schema_bounds; schema_bounds._too_low = lambda _: False; {MAIN}"
"""With the library's own fault, whose cause is refused before it reaches the library."""
FATAL = Grammar('{"type": "integer", "minimum": -1e30, "maximum": -1e26}')
REPLACED = "from protocol.sampling import grammar; grammar.flaw = lambda _: {}; " + MAIN
SOUND = Grammar('{"type": "object"}')


@pytest.fixture
def checks() -> Iterator[list[BoundedProcesses]]:
    """Those in it are ended."""
    made: list[BoundedProcesses] = []
    yield made
    for check in made:
        check.close()


def running(program: str, checks: list[BoundedProcesses]) -> BoundedProcesses:
    checks.append(checking((sys.executable, "-c", program)))
    return checks[-1]


def test_a_fault_of_the_library_is_an_answer_and_the_next_grammar_gets_its_own(checks: list[BoundedProcesses]):
    check = running(FAULTY, checks)

    assert flaw_found_by(check, FATAL) == "This JSON schema can't be enforced: its check fails."
    assert flaw_found_by(check, SOUND) is None
    assert (
        flaw_found_by(check, Grammar('{"type": "nothing"}'))
        == "This JSON schema can't be enforced: Invalid type: nothing."
    )


def test_a_check_without_end_is_ended(checks: list[BoundedProcesses]):
    began = time.process_time()
    reason = flaw_found_by(running(REPLACED.format("any(iter(int, 1))"), checks), SOUND)

    assert reason == "This JSON schema can't be enforced: its check takes over 3 s of processor time."
    assert time.process_time() - began < 1


def test_memory_without_end_is_refused(checks: list[BoundedProcesses]):
    reason = flaw_found_by(running(REPLACED.format("bytearray(2 << 30)"), checks), SOUND)

    assert reason == "This JSON schema can't be enforced: its check takes over 1,024 MiB of memory."


def test_a_process_that_was_ended_by_somebody_else_is_started_again(checks: list[BoundedProcesses]):
    check = running(MAIN, checks)
    assert flaw_found_by(check, SOUND) is None
    check._free[0].terminate()

    assert flaw_found_by(check, Grammar('{"type": "integer"}')) is None


def test_nothing_is_said_of_a_grammar_that_nobody_can_check():
    with pytest.raises(PipelineError, match="No process can be started"):
        flaw_found_by(checking(("/nonexistent",)), SOUND)


def test_the_library_is_not_loaded_by_who_asks():
    program = (
        "import sys; from orchestrator.machine.grammar_check import require_enforceable; "
        "from protocol.messages.grammar import Grammar; "
        "require_enforceable(Grammar('{}')); sys.exit('llguidance' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0
