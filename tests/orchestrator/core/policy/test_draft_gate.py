"""Laws of drafts that do not pay beside the target: they rest, and `adaptive` is hardly slower than plain decoding."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

import pytest
from msgspec import structs

from orchestrator.core.commands import Emit, SendMessage
from orchestrator.core.estimates import DraftGate
from orchestrator.core.options import Options
from orchestrator.lab.simulate.acceptance import AcceptanceModel, ModelledLanguage
from orchestrator.lab.simulate.devices import Devices
from orchestrator.lab.simulate.plan import GREEDY, Scenario, simulated
from orchestrator.lab.simulate.workers import ModelledDraft
from orchestrator.machine.profiles.device_profiles import load_profile
from protocol.messages.base import NodeId
from protocol.messages.worker import Start, Stop
from protocol.speculation.token_tree import Candidates
from protocol.worker.pacing import DevicePace
from tests.support.simulation import Simulation, modelled_pipeline

LATE = Devices.of(load_profile("m4-pro-llama3.2-3b"))
"""A step of the draft takes 1.15 of the target's forward."""


def with_step(ratio: float) -> DevicePace:
    """The draft, a step of which takes so much of the target's forward over one token."""
    factor = ratio * LATE.target.forward(1) / LATE.draft.forward(1)
    return structs.replace(LATE.draft, steps=tuple((width, factor * seconds) for width, seconds in LATE.draft.steps))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("tokens", "requests"), [(16, 48), (64, 12), (512, 2)])
@pytest.mark.parametrize(
    ("ratio", "accept", "slow_down"), [*product((0.8, 1.1, 1.5, 3.0), (0.3, 0.5, 0.8, 0.95), (1.0, 1.05, 1.1))]
)
def test_with_a_late_draft_adaptive_is_hardly_slower_than_plain_decoding(
    ratio: float, accept: float, slow_down: float, tokens: int, requests: int
):
    devices = replace(LATE, draft=with_step(ratio), slow_down=slow_down)
    acceptance = replace(GREEDY, accept=accept)
    scenario = Scenario(devices=devices, acceptance=acceptance, tokens=tokens, requests=requests)
    reached = simulated(scenario, "adaptive").tokens_per_second

    assert reached >= 0.98 * simulated(scenario, "ar").tokens_per_second
    if ratio == 0.8 and accept == 0.95 and tokens == 512:
        assert reached > 1.05 * simulated(scenario, "ar").tokens_per_second


# Taken up again -----------------------------------------------------------------------------------


CHANGE, WITHIN = 400, 1000
"""The draft becomes useful after so many tokens, and is taken up within so many."""


@dataclass(frozen=True)
class ChangingLanguage(ModelledLanguage):
    """The draft guesses as in `later` from a position on."""

    later: AcceptanceModel = AcceptanceModel(accept=0.9)

    def accept_at(self, request: int, position: int) -> float:
        return self._present(position).accept

    def candidates(self, request: int, node: NodeId, position: int, on_target_path: bool, limit: int) -> Candidates:
        present = ModelledLanguage(self._present(position), self.seed, self.prompt_tokens)
        return present.candidates(request, node, position, on_target_path, limit)

    def _present(self, position: int) -> AcceptanceModel:
        return self.later if position >= self.prompt_tokens + CHANGE else self.acceptance


def served(simulation: Simulation) -> list[tuple[type, int]]:
    """When the draft was told to start and to stop, by the tokens that were generated until then."""
    told, generated = [], 0
    for command in (command for _, _, commands in simulation.history for command in commands):
        match command:
            case Emit(_, tokens):
                generated += len(tokens)
            case SendMessage("draft", Start() | Stop() as message):
                told.append((type(message), generated))
    return told


def is_taken_up(simulation: Simulation, tokens: int) -> bool:
    """Whether the draft rested before the change, and served the request from some moment after it to the end."""
    *earlier, (began, at), (ended, last) = served(simulation)
    rested = any(kind is Stop and generated < CHANGE for kind, generated in earlier)
    return rested and (began, ended, last) == (Start, Stop, tokens) and CHANGE <= at <= CHANGE + WITHIN


@pytest.mark.thorough
@pytest.mark.parametrize("profile", ["m4-16gb-qwen2.5-3b", "m3-pro-qwen3-4b"])
def test_a_draft_is_taken_up_again_when_the_text_becomes_easy(profile: str):
    language = ChangingLanguage(AcceptanceModel(accept=0.1))
    simulation = modelled_pipeline(Options(), language, Devices.of(load_profile(profile)), kept=None)
    client = simulation.clients[simulation.submit(1, 2000)]
    simulation.run()

    assert client.tokens == client.reference
    assert is_taken_up(simulation, 2000)


def test_a_draft_is_taken_up_again_when_it_becomes_faster():
    language = ModelledLanguage(AcceptanceModel(accept=0.9))
    simulation = modelled_pipeline(Options(), language, LATE, kept=None)
    client = simulation.clients[simulation.submit(1, 1600)]
    while len(client.tokens) < CHANGE:
        simulation.advance()
    simulation.remove(simulation.own["draft"])
    simulation.build = lambda _: ModelledDraft(language, with_step(0.3))
    simulation.start("draft")
    simulation.run()

    assert client.tokens == client.reference
    assert is_taken_up(simulation, 1600)


# Gains and losses by the round --------------------------------------------------------------------


PLAIN = 0.016
"""Seconds of a round of plain decoding beside a resting draft."""


@dataclass
class Decoding:
    """Rounds of a lone request. A draft that rests leaves the guesses of prompt lookup: so many tokens a round."""

    gate: DraftGate
    lookup: float = 1.0
    rounds: int = 0
    worked: int = 0
    tokens: float = 0.0
    seconds: float = 0.0

    def decode(self, rounds: int, tokens: float, slow_down: float, reads: Callable[[int], bool] = lambda _: False):
        """`reads`: whether a draft that began so many rounds ago still reads the prompt."""
        since = 0
        for _ in range(rounds):
            rests = self.gate.paused or self.gate.measuring
            since = 0 if self.gate.paused else since + 1
            reading = not rests and reads(since)
            given = self.lookup * (1.0 if rests or reading else tokens)
            seconds = PLAIN * (1.0 if rests else slow_down)
            self.gate.observe_gain(given, seconds, reading, 1.0 / (PLAIN * slow_down), self.lookup)
            self.gate.observe(None)
            self.rounds, self.worked = self.rounds + 1, self.worked + (not rests)
            self.tokens, self.seconds = self.tokens + given, self.seconds + seconds

    @property
    def gain(self) -> float:
        """Ratio to decoding without the draft."""
        return PLAIN * self.tokens / self.lookup / self.seconds


def decoded(
    rounds: int,
    tokens: float,
    slow_down: float,
    reads: Callable[[int], bool] = lambda _: False,
    lookup: float = 1.0,
) -> Decoding:
    decoding = Decoding(DraftGate(), lookup)
    decoding.decode(rounds, tokens, slow_down, reads)
    return decoding


@pytest.mark.parametrize(("tokens", "slow_down"), [(1.25, 1.0), (1.3, 1.05), (1.6, 1.2), (3.0, 1.0)])
def test_a_draft_that_clearly_pays_always_works(tokens: float, slow_down: float):
    assert decoded(2000, tokens, slow_down).worked == 2000


@pytest.mark.parametrize("gain", [1.02, 1.05])
def test_a_draft_that_pays_a_little_rests_once_so_that_plain_decoding_is_measured(gain: float):
    decoding = decoded(2000, gain, 1.0)

    assert 1980 < decoding.worked < 2000


@pytest.mark.parametrize("lookup", [1.0, 2.5])
@pytest.mark.parametrize("reading", [0, 30, 300])
@pytest.mark.parametrize(("tokens", "slow_down"), [(1.0, 1.05), (1.0, 1.3), (1.15, 1.2)])
def test_tries_of_a_draft_that_does_not_pay_cost_less_than_a_hundredth(
    tokens: float, slow_down: float, reading: int, lookup: float
):
    """A long prompt is read the more seldom, however short the answers are. `tokens`: beside those of lookup alone."""
    decoding = decoded(20_000, tokens, slow_down, lambda since: since < reading, lookup)

    assert 0 < decoding.worked < 0.25 * decoding.rounds
    assert decoding.gain > 0.985


def test_answers_that_end_before_their_prompts_are_read_go_on_without_the_draft():
    decoding = Decoding(DraftGate())
    for _ in range(500):
        decoding.decode(16, 2.0, 1.1, lambda since: since < 40)
        decoding.gate.request_ended()

    assert decoding.gain > 0.985


def test_a_draft_that_pays_works_again_after_a_text_in_which_it_did_not():
    decoding = decoded(1000, 1.4, 1.1)
    decoding.decode(2000, 1.0, 1.1)
    assert decoding.gate.paused or decoding.worked < 1500
    before = decoding.worked
    decoding.decode(2000, 1.4, 1.1)

    assert decoding.worked - before > 1400


def test_a_stall_is_no_reason_to_rest():
    gate = DraftGate()
    for number in range(400):
        gate.observe_gain(1.5, 30.0 if number == 200 else PLAIN, False, 1.0 / PLAIN, 1.0)

    assert not gate.paused
    assert not gate.measuring


# A draft that never guesses right ----------------------------------------------------------------


def draft_told(accept: float, strategy: str = "adaptive", tokens: int = 400) -> list[tuple[type, int]]:
    language = ModelledLanguage(AcceptanceModel(accept=accept), 1)
    devices = Devices.of(load_profile("m4-16gb-qwen2.5-3b"))
    simulation = modelled_pipeline(Options(strategy=strategy), language, devices, kept=None)
    client = simulation.clients[simulation.submit(1, tokens)]
    simulation.run()
    assert client.tokens == client.reference
    return served(simulation)


@pytest.mark.parametrize(("strategy", "longest"), [("sd", 64), ("ssd", 64), ("adaptive", 400)])
def test_a_draft_that_is_never_right_rests_and_is_tried_again(strategy: str, longest: int):
    told = draft_told(0.0, strategy, tokens=600)

    assert [kind for kind, _ in told[:3]] == [Start, Stop, Start]
    stopped, again = told[1][1], told[2][1]
    assert 31 <= stopped <= 64
    assert 31 <= again - stopped <= longest


@pytest.mark.thorough
def test_a_draft_that_is_sometimes_right_never_rests():
    told = draft_told(0.3)

    # The Stop is the request's end.
    assert [kind for kind, _ in told] == [Start, Stop]
    assert told[1][1] == 400


def test_rests_grow_up_to_a_limit_and_are_short_again_after_one_right_guess():
    gate, rests = DraftGate(), []

    def barren_until_rest():
        wrong = rounds = 0
        while not gate.paused:
            gate.observe(False)
            wrong += 1
        assert wrong == 32
        while gate.paused:
            gate.observe(None)
            rounds += 1
        rests.append(rounds)

    for _ in range(5):
        barren_until_rest()
    gate.observe(True)
    barren_until_rest()

    assert rests == [32, 64, 128, 256, 256, 32]


def test_rounds_without_any_guess_say_nothing():
    gate = DraftGate()
    for _ in range(1000):
        gate.observe(None)

    assert not gate.paused
