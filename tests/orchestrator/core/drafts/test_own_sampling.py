"""Laws of a sampling that the draft alone has: only the draft hears of it, also when it starts again."""

from dataclasses import replace

import pytest

from orchestrator.core.events import Event, Submitted
from protocol.messages.sampling import Sampling
from protocol.messages.worker import Start
from tests.support.scripted_simulation import ScriptedSimulation, ready

OWN = Sampling(temperature=0.5, seed=1)


@pytest.mark.parametrize("own", [OWN, None])
def test_only_the_draft_draws_with_it(own: Sampling | None, monkeypatch: pytest.MonkeyPatch):
    simulation = ready("sd")
    step = simulation.step
    monkeypatch.setattr(simulation, "step", lambda event: step(with_own_sampling(event, own)))

    simulation.submit(1, max_tokens=60, temperature=1.0)
    simulation.run_events(20)
    lost = simulation.own["draft"]
    assert simulation.kill("draft")
    simulation.run()

    shared = Sampling(temperature=1.0, seed=1)
    assert heard(simulation, simulation.own["target"]) == {shared}
    assert heard(simulation, lost) == heard(simulation, simulation.own["draft"]) == {own or shared}


def with_own_sampling(event: Event, own: Sampling | None) -> Event:
    if not isinstance(event, Submitted):
        return event
    return replace(event, request=replace(event.request, draft_sampling=own))


def heard(simulation: ScriptedSimulation, incarnation: int) -> set[Sampling]:
    return {start.sampling for start in simulation.sent(Start, incarnation)}
