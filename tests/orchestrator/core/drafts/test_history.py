"""Laws of what a draft leaves behind: the next life finds it once, and nothing else stays."""

from orchestrator.core.commands import Command, Release, SendMessage
from orchestrator.core.drafts.history import DraftArenas
from orchestrator.core.events import Arrived, Request, Submitted, WorkerDown, WorkerUp
from orchestrator.core.machine import Machine
from orchestrator.core.options import Options
from orchestrator.lab.simulate.workers import modelled_hello
from protocol.messages.base import SequenceId
from protocol.messages.kv import KvOffer, KvReference
from protocol.messages.sampling import Sampling
from protocol.messages.worker import Grow, Prefilled, Start

ONE, TWO = SequenceId(1), SequenceId(2)
A, B = "lp-" + "a" * 20, "lp-" + "b" * 20


def offer(sequence: SequenceId, name: str, tokens: int = 40) -> KvOffer:
    return KvOffer(sequence, name, tokens, size=1000, seconds=0.0)


def test_a_life_that_ends_before_it_offers_anything_leaves_what_it_took_over():
    arenas = DraftArenas()
    arenas.add(offer(ONE, A), live=True)
    arenas.draft_down()
    arenas.adopt(ONE)

    assert arenas.draft_down() == []
    assert arenas.adopt(ONE) == KvReference(A, 40)


def test_an_arena_that_two_lives_did_not_survive_adopting_is_not_adopted_again():
    arenas = DraftArenas()
    arenas.add(offer(ONE, A), live=True)
    arenas.add(offer(TWO, B), live=True)
    arenas.draft_down()
    arenas.adopt(ONE)

    assert arenas.draft_down() == []
    assert arenas.adopt(ONE) == KvReference(A, 40)
    assert arenas.draft_down() == [Release(A)]
    assert arenas.adopt(ONE) is None
    assert arenas.adopt(TWO) == KvReference(B, 40)
    assert arenas.warnings == 1


def test_arenas_of_sequences_that_are_over_go_with_the_draft():
    arenas = DraftArenas()
    arenas.add(offer(ONE, A), live=True)
    arenas.add(offer(TWO, B), live=True)
    arenas.sequence_ended(ONE)

    assert arenas.draft_down() == [Release(A)]
    assert arenas.adopt(ONE) is None
    assert arenas.adopt(TWO) == KvReference(B, 40)


def test_an_arena_that_serves_another_sequence_is_that_ones():
    arenas = DraftArenas()
    arenas.add(offer(ONE, A), live=True)
    arenas.sequence_ended(ONE)
    arenas.add(offer(TWO, A, 33), live=True)

    assert arenas.draft_down() == []
    assert arenas.adopt(TWO) == KvReference(A, 33)


def test_an_arena_that_was_refused_is_counted_and_given_up():
    arenas = DraftArenas()
    arenas.add(offer(ONE, A), live=True)
    arenas.draft_down()
    arenas.adopt(ONE)
    arenas.note_adoption(Prefilled(ONE, 3, 40, 0.0, 0, "torn"))

    assert arenas.warnings == 1
    assert arenas.draft_down() == [Release(A)]


# In the machine ------------------------------------------------------------------------------------


def starts(commands: list[Command]) -> list[Start]:
    """What a draft is told to start."""
    told = [command for command in commands if isinstance(command, SendMessage) and command.role == "draft"]
    return [command.message for command in told if isinstance(command.message, Start)]


def drafting() -> Machine:
    machine = Machine(Options())
    machine.step(WorkerUp(1, modelled_hello("target")), 0.0)
    machine.step(WorkerUp(2, modelled_hello("draft")), 0.0)
    return machine


def test_a_draft_that_is_back_is_told_what_the_last_one_left_and_counted_if_it_could_not_use_it():
    machine = drafting()
    (first,) = starts(machine.step(Submitted(ONE, Request(tuple([7] * 60), Sampling(), 10)), 0.0))
    machine.step(Arrived("draft", 2, offer(ONE, A, 59)), 0.1)
    machine.step(WorkerDown("draft", 2), 0.2)
    (second,) = starts(machine.step(WorkerUp(3, modelled_hello("draft")), 0.3))
    machine.step(Arrived("draft", 3, Prefilled(ONE, 0, 2, 0.0, 0, "torn")), 0.4)

    assert first.adopt is None
    assert second.adopt == KvReference(A, 59)
    assert machine.drafts.warnings == 1


def test_the_end_of_a_request_gives_its_arena_to_others():
    machine = drafting()
    machine.step(Submitted(ONE, Request((1, 2, 3), Sampling(), 10)), 0.0)
    machine.step(Arrived("draft", 2, offer(TWO, A)), 0.1)

    assert Release(A) in machine.step(WorkerDown("draft", 2), 0.2)


def test_what_a_draft_had_read_before_says_nothing_of_how_fast_it_reads():
    machine = drafting()
    machine.step(Submitted(ONE, Request(tuple([7] * 301), Sampling(), 10)), 0.0)
    machine.step(Arrived("draft", 2, Prefilled(ONE, 0, 100, 0.0, 200)), 1.0)
    root = machine.sequences[ONE].tree.root.id
    machine.step(Arrived("draft", 2, Grow(ONE, 0, (root,), (3,), (0.5,), evaluated=1, seconds=0.0)), 1.0)

    assert machine.sequences[ONE].estimates.prefill.get(0.0) == 1.0 / 100
