"""A draft that never guesses right rests, is tried again, and costs no token."""

import pytest

from orchestrator.core.commands import Emit, SendMessage
from orchestrator.core.options import Options
from orchestrator.core.policy.tries import Usefulness
from orchestrator.lab.simulate.acceptance import AcceptanceModel, ModelledLanguage
from orchestrator.lab.simulate.devices import Devices
from orchestrator.lab.simulate.workers import modelled_pipeline
from orchestrator.machine.profiles.device_profiles import load_profile
from protocol.messages.worker import Start, Stop

DEVICES = Devices.of(load_profile("m4-16gb-qwen2.5-3b"))


def draft_told(accept: float, strategy: str = "adaptive", tokens: int = 400) -> list[tuple[type, int]]:
    """When the draft is told to start and to stop, by the tokens served until then."""
    language = ModelledLanguage(AcceptanceModel(accept=accept), 1)
    simulation = modelled_pipeline(Options(strategy=strategy), language, DEVICES, kept=None)
    client = simulation.clients[simulation.submit(1, tokens)]
    simulation.run()
    assert client.tokens == client.reference
    told, served = [], 0
    for command in (command for _, _, commands in simulation.history for command in commands):
        match command:
            case Emit(_, emitted):
                served += len(emitted)
            case SendMessage("draft", Start() | Stop() as message):
                told.append((type(message), served))
    return told


@pytest.mark.parametrize("strategy", ["sd", "ssd", "adaptive"])
def test_a_draft_that_is_never_right_rests_and_is_tried_again(strategy):
    told = draft_told(0.0, strategy)

    assert [kind for kind, _ in told[:3]] == [Start, Stop, Start]
    stopped, again = told[1][1], told[2][1]
    assert 31 <= stopped <= 48
    assert 62 <= again <= 96


@pytest.mark.thorough
def test_a_draft_that_is_sometimes_right_never_rests():
    told = draft_told(0.3)

    # The Stop is the request's end.
    assert [kind for kind, _ in told] == [Start, Stop]
    assert told[1][1] == 400


def test_rests_grow_up_to_a_limit_and_are_short_again_after_one_right_guess():
    usefulness, rests = Usefulness(), []

    def barren_until_rest():
        while not usefulness.paused:
            usefulness.observe(False)
        rounds = 0
        while usefulness.paused:
            usefulness.observe(None)
            rounds += 1
        rests.append(rounds)

    for _ in range(5):
        barren_until_rest()
    usefulness.observe(True)
    barren_until_rest()

    assert rests == [32, 64, 128, 256, 256, 32]


def test_rounds_without_any_guess_say_nothing():
    usefulness = Usefulness()
    for _ in range(1000):
        usefulness.observe(None)

    assert not usefulness.paused
