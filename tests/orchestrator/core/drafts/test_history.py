"""Laws of the KV that drafts adopt: what a draft left behind, or what its target saved of the same layers."""

import pytest
from msgspec.structs import replace

from orchestrator.core.commands import Command, Release, SendMessage
from orchestrator.core.drafts.history import DraftArenas
from orchestrator.core.events import Arrived, Submitted, Task, WorkerDown, WorkerUp
from orchestrator.core.machine import Machine
from orchestrator.core.options import Options
from orchestrator.core.workers import shares_first_layers
from orchestrator.lab.simulate.workers import modelled_hello
from protocol.messages.base import RequestId
from protocol.messages.kv import KvForm, KvOffer, KvReference
from protocol.messages.sampling import Sampling
from protocol.messages.worker import Grow, Hello, Prefilled, Start, Verdict, Verify
from protocol.worker.pacing import DevicePace

ONE, TWO = RequestId(1), RequestId(2)
A, B = "lp-" + "a" * 20, "lp-" + "b" * 20


def offer(sequence: RequestId, name: str, tokens: int = 40) -> KvOffer:
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


def test_arenas_of_sequences_that_are_over_go_with_the_draft_unless_they_serve_another_one():
    arenas = DraftArenas()
    arenas.add(offer(ONE, A), live=True)
    arenas.add(offer(TWO, B), live=True)
    arenas.request_ended(ONE)
    assert arenas.draft_down() == [Release(A)]
    assert (arenas.adopt(ONE), arenas.adopt(TWO)) == (None, KvReference(B, 40))
    arenas.request_ended(TWO)
    arenas.add(offer(ONE, B, 48), live=True)

    assert arenas.draft_down() == []
    assert arenas.adopt(ONE) == KvReference(B, 48)


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
    (first,) = starts(machine.step(Submitted(ONE, Task(tuple([7] * 60), Sampling(), 10)), 0.0).all())
    machine.step(Arrived("draft", 2, offer(ONE, A, 59)), 0.1)
    machine.step(WorkerDown("draft", 2), 0.2)
    (second,) = starts(machine.step(WorkerUp(3, modelled_hello("draft")), 0.3).all())
    machine.step(Arrived("draft", 3, Prefilled(ONE, 0, 2, 0.0, 0, "torn")), 0.4)

    assert first.adopt is None
    assert second.adopt == KvReference(A, 59)
    assert machine.kv_warnings == 1


def test_the_end_of_a_request_gives_its_arena_to_others():
    machine = drafting()
    machine.step(Submitted(ONE, Task((1, 2, 3), Sampling(), 10)), 0.0)
    machine.step(Arrived("draft", 2, offer(TWO, A)), 0.1)

    assert Release(A) in machine.step(WorkerDown("draft", 2), 0.2).all()


def test_what_a_draft_had_read_before_says_nothing_of_how_fast_it_reads():
    machine = drafting()
    machine.step(Submitted(ONE, Task(tuple([7] * 301), Sampling(), 10)), 0.0)
    machine.step(Arrived("draft", 2, Prefilled(ONE, 0, 100, 0.0, 200)), 1.0)
    root = machine.requests[ONE].tree.root.id
    machine.step(Arrived("draft", 2, Grow(ONE, 0, (root,), (3,), (0.5,), evaluated=1, seconds=0.0)), 1.0)

    assert machine.requests[ONE].estimates.prefill.get(0.0) == 1.0 / 100


# A draft that is its target's first layers -------------------------------------------------------


PACE = DevicePace(steps=((1, 0.01),), prefill_rate=1000.0)
PROMPT = tuple(range(600))
FORM = KvForm(layers=8, kv_heads=2, head_size=16, element=1)
TARGET = replace(modelled_hello("target", 4096, PACE), kv=FORM, model_fingerprint="weights")
DRAFT = replace(modelled_hello("draft", 4096, PACE), kv=replace(FORM, layers=2), model_fingerprint="weights")


class Driven:
    """A machine whose target saves what the test says."""

    def __init__(self, draft: Hello = DRAFT, prompt: tuple[int, ...] = PROMPT) -> None:
        self.machine = Machine(Options())
        self.now = 0.0
        self.commands: list[Command] = []
        self.take(WorkerUp(1, TARGET))
        self.take(WorkerUp(2, draft))
        self.take(Submitted(ONE, Task(tokens=prompt, max_tokens=300, sampling=Sampling())))

    def take(self, event: object) -> None:
        self.now += 0.01
        self.commands = self.machine.step(event, self.now).all()  # type: ignore[arg-type]

    def prefilled(self) -> None:
        self.take(Arrived("target", 1, Prefilled(ONE, 0, len(PROMPT) - 1, 0.5)))

    def round(self) -> None:
        """The target verifies the root alone."""
        outstanding = self.machine.requests[ONE].outstanding
        assert isinstance(outstanding, Verify)
        self.take(Arrived("target", 1, Verdict(ONE, outstanding.round, (), 5, 0.01)))

    @property
    def starts(self) -> list[Start]:
        """What the draft was told by the last event."""
        return starts(self.commands)


def test_the_draft_waits_for_the_kv_of_the_prompt_and_adopts_it():
    driven = Driven()
    assert driven.starts == []
    driven.prefilled()
    assert driven.starts == []
    driven.take(Arrived("target", 1, offer(ONE, A, 256)))
    assert driven.starts == []
    driven.take(Arrived("target", 1, offer(ONE, A, 512)))

    assert [start.adopt for start in driven.starts] == [KvReference(A, 512)]


def test_a_target_that_saves_nothing_is_not_waited_for_for_ever():
    driven = Driven()
    driven.prefilled()
    patience = 2 + 599 // 128
    for _ in range(patience - 1):
        driven.round()
        assert driven.starts == []
    driven.round()

    assert [start.adopt for start in driven.starts] == [None]


@pytest.mark.parametrize(
    "draft",
    [
        replace(DRAFT, kv=None, model_fingerprint=""),
        replace(DRAFT, model_fingerprint="other weights"),
        replace(DRAFT, kv=replace(FORM, layers=9)),
        replace(DRAFT, kv=replace(FORM, element=3)),
    ],
)
def test_a_draft_with_other_kv_starts_at_once_and_adopts_nothing(draft: Hello):
    driven = Driven(draft)

    assert [start.adopt for start in driven.starts] == [None]
    assert not shares_first_layers(draft, TARGET)


def test_a_short_prompt_is_read_at_once():
    assert [start.adopt for start in Driven(prompt=PROMPT[:100]).starts] == [None]


def test_a_draft_that_comes_back_adopts_what_the_target_has_saved_meanwhile():
    driven = Driven()
    driven.prefilled()
    driven.take(Arrived("target", 1, offer(ONE, A, 599)))
    driven.take(WorkerDown("draft", 2))
    driven.take(WorkerUp(3, DRAFT))

    assert [start.adopt for start in driven.starts] == [KvReference(A, 599)]


def test_kv_that_two_lives_did_not_survive_adopting_is_not_offered_again():
    arenas = DraftArenas()
    reference = KvReference(A, 40)
    for _ in range(2):
        assert arenas.share(ONE, reference) == reference
        arenas.draft_down()

    assert arenas.share(ONE, reference) is None
    assert arenas.share(ONE, KvReference(B, 40)) == KvReference(B, 40)


def test_kv_that_was_adopted_once_may_be_adopted_by_any_number_of_lives():
    arenas = DraftArenas()
    reference = KvReference(A, 40)
    for _ in range(4):
        assert arenas.share(ONE, reference) == reference
        arenas.note_adoption(Prefilled(ONE, 0, 0, 0.0, 40))
        arenas.draft_down()

    assert arenas.warnings == 0
