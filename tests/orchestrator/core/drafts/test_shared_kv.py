"""Laws of a draft that is its target's first layers: it is told where the target has saved their KV."""

import pytest
from msgspec.structs import replace

from orchestrator.core.commands import Command, SendMessage
from orchestrator.core.drafts.history import DraftArenas
from orchestrator.core.events import Arrived, Request, Submitted, WorkerDown, WorkerUp
from orchestrator.core.machine import Machine
from orchestrator.core.options import Options
from orchestrator.core.workers import shares_first_layers
from orchestrator.lab.simulate.workers import modelled_hello
from protocol.messages.base import SequenceId
from protocol.messages.kv import KvForm, KvOffer, KvReference
from protocol.messages.sampling import Sampling
from protocol.messages.worker import Hello, Prefilled, Start, Verdict, Verify
from protocol.worker.pacing import DevicePace

ONE = SequenceId(1)
ARENA, OTHER = "lp-" + "a" * 20, "lp-" + "b" * 20
PACE = DevicePace(steps=((1, 0.01),), prefill_rate=1000.0)
PROMPT = tuple(range(600))
FORM = KvForm(layers=8, kv_heads=2, head_size=16, element=1)
TARGET = replace(modelled_hello("target", 4096, PACE), kv=FORM, model_fingerprint="weights")
DRAFT = replace(modelled_hello("draft", 4096, PACE), kv=replace(FORM, layers=2), model_fingerprint="weights")


def offer(tokens: int) -> KvOffer:
    return KvOffer(ONE, ARENA, tokens, size=1000, seconds=0.0)


class Driven:
    """A machine whose target saves what the test says."""

    def __init__(self, draft: Hello = DRAFT, prompt: tuple[int, ...] = PROMPT) -> None:
        self.machine = Machine(Options())
        self.now = 0.0
        self.commands: list[Command] = []
        self.take(WorkerUp(1, TARGET))
        self.take(WorkerUp(2, draft))
        self.take(Submitted(ONE, Request(tokens=prompt, max_tokens=300, sampling=Sampling())))

    def take(self, event: object) -> None:
        self.now += 0.01
        self.commands = self.machine.step(event, self.now)  # type: ignore[arg-type]

    def prefilled(self) -> None:
        self.take(Arrived("target", 1, Prefilled(ONE, 0, len(PROMPT) - 1, 0.5)))

    def round(self) -> None:
        """The target verifies the root alone."""
        outstanding = self.machine.sequences[ONE].outstanding
        assert isinstance(outstanding, Verify)
        self.take(Arrived("target", 1, Verdict(ONE, outstanding.round, (), 5, 0.01)))

    @property
    def starts(self) -> list[Start]:
        """What the draft was told by the last event."""
        sent = [each for each in self.commands if isinstance(each, SendMessage) and each.role == "draft"]
        return [each.message for each in sent if isinstance(each.message, Start)]


def test_the_draft_waits_for_the_kv_of_the_prompt_and_adopts_it():
    driven = Driven()
    assert driven.starts == []
    driven.prefilled()
    assert driven.starts == []
    driven.take(Arrived("target", 1, offer(256)))
    assert driven.starts == []
    driven.take(Arrived("target", 1, offer(512)))

    assert [start.adopt for start in driven.starts] == [KvReference(ARENA, 512)]


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
    driven.take(Arrived("target", 1, offer(599)))
    driven.take(WorkerDown("draft", 2))
    driven.take(WorkerUp(3, DRAFT))

    assert [start.adopt for start in driven.starts] == [KvReference(ARENA, 599)]


def test_kv_that_two_lives_did_not_survive_adopting_is_not_offered_again():
    arenas = DraftArenas()
    reference = KvReference(ARENA, 40)
    for _ in range(2):
        assert arenas.share(ONE, reference) == reference
        arenas.draft_down()

    assert arenas.share(ONE, reference) is None
    assert arenas.share(ONE, KvReference(OTHER, 40)) == KvReference(OTHER, 40)


def test_kv_that_was_adopted_once_may_be_adopted_by_any_number_of_lives():
    arenas = DraftArenas()
    reference = KvReference(ARENA, 40)
    for _ in range(4):
        assert arenas.share(ONE, reference) == reference
        arenas.note_adoption(Prefilled(ONE, 0, 0, 0.0, 40))
        arenas.draft_down()

    assert arenas.warnings == 0
