"""What a draft has read before says nothing of how fast it reads."""

from orchestrator.core.events import Arrived, Submitted, Task, WorkerUp
from orchestrator.core.machine import Machine
from orchestrator.core.options import Options
from orchestrator.lab.simulate.workers import modelled_hello
from protocol.messages.base import RequestId
from protocol.messages.sampling import Sampling
from protocol.messages.worker import Grow, Prefilled

ONE = RequestId(1)


def test_what_a_draft_had_read_before_says_nothing_of_how_fast_it_reads():
    machine = Machine(Options())
    machine.step(WorkerUp(1, modelled_hello("target")), 0.0)
    machine.step(WorkerUp(2, modelled_hello("draft")), 0.0)
    machine.step(Submitted(ONE, Task(tuple([7] * 301), Sampling(), 10)), 0.0)
    machine.step(Arrived("draft", 2, Prefilled(ONE, 0, 100, 0.0, 200)), 1.0)
    root = machine.requests[ONE].tree.root.id
    machine.step(Arrived("draft", 2, Grow(ONE, 0, (root,), (3,), (0.5,), evaluated=1, seconds=0.0)), 1.0)

    assert machine.requests[ONE].estimates.prefill.get(0.0) == 1.0 / 100
