"""A draft that never guesses right rests, is tried again, and costs no token."""

import pytest

from orchestrator.core.commands import SendMessage
from orchestrator.core.options import Options, StrategyName
from orchestrator.core.policy.estimates import Usefulness
from orchestrator.machine.device_profiles import load_profile
from orchestrator.tools.simulate.acceptance import AcceptanceModel, InventedLanguage
from orchestrator.tools.simulate.devices import Devices
from orchestrator.tools.simulate.run import Simulation
from protocol.messages.worker import Start, Stop

DEVICES = Devices.of(load_profile("m4-16gb-qwen2.5-3b"))


class Watched(Simulation):
    """Takes down when the draft is told to start and to stop, by the tokens served until then."""

    def _perform(self, command):
        if isinstance(command, SendMessage) and command.role == "draft" and isinstance(command.message, Start | Stop):
            served = sum(len(each.tokens) for each in self.served.values())
            self.told = [*getattr(self, "told", []), (type(command.message), served)]
        super()._perform(command)


def served(accept: float, strategy: StrategyName = "adaptive", tokens: int = 400) -> Watched:
    simulation = Watched(Options(strategy=strategy), InventedLanguage(AcceptanceModel(accept=accept), 1), DEVICES)
    sequence = simulation.submit(1, tokens)
    simulation.run()
    assert simulation.served[sequence].tokens == simulation.truth(sequence)
    return simulation


@pytest.mark.parametrize("strategy", ["sd", "ssd", "adaptive"])
def test_a_draft_that_is_never_right_rests_and_is_tried_again(strategy):
    told = served(0.0, strategy).told

    assert [kind for kind, _ in told[:3]] == [Start, Stop, Start]
    stopped, again = told[1][1], told[2][1]
    assert 31 <= stopped <= 48
    assert 62 <= again <= 96


def test_a_draft_that_is_sometimes_right_never_rests():
    told = served(0.3).told

    # The Stop is the request's end.
    assert [kind for kind, _ in told] == [Start, Stop]
    assert told[1][1] == 400


def test_rests_grow_up_to_a_limit_and_are_short_again_after_one_right_guess():
    usefulness, rests = Usefulness(), []

    def barren_until_rest():
        while not usefulness.resting:
            usefulness.observe(False)
        rounds = 0
        while usefulness.resting:
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

    assert not usefulness.resting
