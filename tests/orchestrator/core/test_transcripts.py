"""Ten short runs, each as a text that reads from top to bottom: what happens, and what the core makes of it.

`python -m tests.orchestrator.core.test_transcripts` writes the texts again after a change that is meant to change them.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.lab.simulate.acceptance import AcceptanceModel, ModelledLanguage
from orchestrator.lab.simulate.workers import ModelledDraft, modelled_workers
from protocol.messages.worker import FromWorker, Grow, ToWorker
from tests.support.scripted_simulation import CONTEXT, DEVICES, DRAFT, LANGUAGE, ONE, ScriptedSimulation, ready
from tests.support.transcripts import transcript

FOLDER = Path(__file__).parent / "transcripts"
NEVER_RIGHT = ModelledLanguage(AcceptanceModel(accept=0.0), seed=1, prompt_tokens=3)
SURE = ModelledLanguage(AcceptanceModel(accept=0.95), seed=1, prompt_tokens=3)


def running(language: ModelledLanguage = LANGUAGE, tokens: int = 8, requests: int = 1, **options) -> ScriptedSimulation:
    simulation = ready(build=modelled_workers(language, DEVICES, CONTEXT), **options)
    for number in range(requests):
        simulation.submit(number + 1, tokens)
    return simulation


def a_hit() -> ScriptedSimulation:
    return running(SURE)


def a_miss() -> ScriptedSimulation:
    return running(NEVER_RIGHT, tokens=3)


def late_growth() -> ScriptedSimulation:
    """What a draft says for 60 ms arrives together."""
    simulation = running(SURE, tokens=12)
    simulation.run_until(0.03)

    def grows(message: ToWorker | FromWorker) -> bool:
        return isinstance(message, Grow)

    simulation.holds = grows
    simulation.run_until(0.09)
    simulation.release()
    return simulation


def a_draft_that_joins() -> ScriptedSimulation:
    simulation = running(tokens=10)
    simulation.run_until(0.04)
    simulation.attach(ModelledDraft(SURE, DRAFT, CONTEXT))
    return simulation


def a_draft_that_dies() -> ScriptedSimulation:
    simulation = running(tokens=10)
    simulation.run_until(0.04)
    simulation.kill("draft")
    simulation.run_until(0.08)
    simulation.start("draft")
    return simulation


def a_target_that_dies_twice() -> ScriptedSimulation:
    """The second one in the same round, as the first one."""
    simulation = running(tokens=10)
    for at in (0.04, 0.105):
        simulation.run_until(at)
        simulation.kill("target")
        simulation.run_until(at + 0.05)
        simulation.start("target")
    return simulation


def a_cancelled_request() -> ScriptedSimulation:
    simulation = running(tokens=40)
    simulation.run_until(0.06)
    simulation.cancel(ONE)
    return simulation


def eight_requests() -> ScriptedSimulation:
    return running(SURE, tokens=4, requests=8)


def a_draft_that_rests_and_returns() -> ScriptedSimulation:
    return running(NEVER_RIGHT, tokens=140, lookup="off")


def turns() -> ScriptedSimulation:
    return running(SURE, tokens=12, placement="shared")


SCENARIOS: list[Callable[[], ScriptedSimulation]] = [
    *(a_hit, a_miss, late_growth, a_draft_that_joins, a_draft_that_dies, a_target_that_dies_twice),
    *(a_cancelled_request, eight_requests, a_draft_that_rests_and_returns, turns),
]


def text(scenario: Callable[[], ScriptedSimulation]) -> str:
    simulation = scenario()
    simulation.run()
    for client in simulation.clients.values():
        assert client.tokens == client.reference[: len(client.tokens)]
    return transcript(simulation.history)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_the_core_does_what_the_transcript_says(scenario: Callable[[], ScriptedSimulation]):
    assert text(scenario) == (FOLDER / f"{scenario.__name__}.txt").read_text(encoding="utf-8")


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for each in SCENARIOS:
        (FOLDER / f"{each.__name__}.txt").write_text(text(each), encoding="utf-8")
