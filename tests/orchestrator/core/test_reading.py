"""Laws of progress: a client learns how far its prompt has been read, not too often, and nothing else changes."""

from orchestrator.core.commands import Command, TellReading
from orchestrator.core.events import Arrived, Request, Submitted, WorkerUp
from orchestrator.core.machine import Machine
from orchestrator.core.options import Options
from orchestrator.lab.simulate.workers import modelled_hello
from protocol.messages.base import SequenceId
from protocol.messages.sampling import Sampling
from protocol.messages.worker import Prefilled, Prefilling

ONE = SequenceId(1)
PROMPT = tuple(range(1, 102))


def reading() -> Machine:
    machine = Machine(Options())
    machine.step(WorkerUp(1, modelled_hello("target")), 0.0)
    machine.step(Submitted(ONE, Request(PROMPT, Sampling(), 9)), 0.0)
    return machine


def told(machine: Machine, message: Prefilling, now: float) -> list[Command]:
    return machine.step(Arrived("target", 1, message), now)


def test_a_client_learns_how_far_its_prompt_was_read_four_times_a_second():
    machine = reading()

    found = [told(machine, Prefilling(ONE, 0, tokens), tokens / 100) for tokens in range(10, 100, 10)]

    assert found == [[TellReading(ONE, tokens, 100)] if tokens in (10, 40, 70) else [] for tokens in range(10, 100, 10)]
    assert machine.stale == 0


def test_a_report_that_does_not_fit_is_dropped():
    machine = reading()

    for message in (Prefilling(SequenceId(2), 0, 5), Prefilling(ONE, 1, 5), Prefilling(ONE, 0, 101)):
        assert told(machine, message, 1.0) == []
    machine.step(Arrived("target", 1, Prefilled(ONE, 0, 100, 0.1)), 1.0)
    assert told(machine, Prefilling(ONE, 0, 50), 2.0) == []
    assert machine.stale == 4
