"""On a GPU whose forwards cost more in steps, the pipeline verifies trees that fill a step. In virtual time."""

from collections import Counter
from collections.abc import Callable

import pytest

from orchestrator.core.commands import SendMessage
from orchestrator.core.options import Options
from orchestrator.lab.simulate.acceptance import AcceptanceModel, ModelledLanguage
from orchestrator.lab.simulate.devices import Devices
from orchestrator.lab.simulate.plan import GREEDY, SAMPLED
from orchestrator.machine.profiles.device_profiles import load_profile
from protocol.messages.worker import Verify
from protocol.worker.pacing import DevicePace
from tests.support.simulation import modelled_pipeline

M4 = Devices.of(load_profile("m4-16gb-qwen2.5-3b"))
KINDS = [pytest.param(GREEDY, id="greedy"), pytest.param(SAMPLED, id="sampled")]


def stepped(step: float, behind: float) -> Devices:
    """A pass over the weights serves five rows; another one costs `step` of the first. From 13 rows on a forward
    costs `behind` times the first."""
    costs = {width: 1.0 + step * ((width - 1) // 5) if width <= 12 else behind for width in range(1, 33)}
    pace = DevicePace(steps=tuple((width, 0.0213 * cost) for width, cost in costs.items()), prefill_rate=800.0)
    return Devices(target=pace, draft=M4.draft, baseline_draft=M4.baseline_draft)


def decoded(devices: Devices, acceptance: AcceptanceModel) -> Counter[int]:
    """How often each width was verified in 2 requests of 150 tokens."""
    simulation = modelled_pipeline(Options(), ModelledLanguage(acceptance, 0), devices, kept=None)
    for request in range(2):
        simulation.submit(request, 150, 0.0 if acceptance is GREEDY else 1.0)
        simulation.run()
    assert all(client.tokens == client.reference for client in simulation.clients.values())
    sent = (command for *_, commands in simulation.history for command in commands if isinstance(command, SendMessage))
    return Counter(len(command.message.tokens) for command in sent if isinstance(command.message, Verify))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("acceptance", KINDS)
@pytest.mark.parametrize(("device", "corner"), [(stepped(0.6, 2.9), 5), (stepped(0.04, 2.9), 10)])
def test_the_chosen_widths_fill_a_pass_over_the_weights(device: Devices, corner: int, acceptance: AcceptanceModel):
    widths = decoded(device, acceptance)

    speculative = widths.total() - widths[1]
    assert widths[corner] > 0.5 * speculative
    assert widths[corner + 1] < 0.02 * speculative


def draft_in_steps(first: Callable[[int], float]) -> Devices:
    steps = tuple((width, 0.0057 * first(width)) for width in range(1, 33))
    return Devices(target=M4.target, draft=DevicePace(steps=steps, prefill_rate=4000.0), baseline_draft=M4.draft)


def test_growth_steps_stay_narrow_where_wide_ones_cost_a_multiple():
    """A draft of 4-bit weights on a GPU: eight rows take two passes over the weights, sixteen another kernel."""
    steep = draft_in_steps(lambda width: 1.0 if width <= 5 else 2.0 if width <= 10 else 3.5)
    simulation = modelled_pipeline(Options(), ModelledLanguage(GREEDY, 0), steep)
    for request in range(2):
        simulation.submit(request, 60)
        simulation.run()

    estimates = simulation.machine.drafts.estimates(next(iter(simulation.clients.values())).task, 100)
    assert estimates.step.get(1.0) < 0.0057 * 1.5
