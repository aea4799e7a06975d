"""In turns, the expected-rate rule is as fast as the best fixed plan of growth steps and nodes, in virtual time.

The devices are two processor cores that draft and target share (docs/log/2026.md, "One device, in turns").
"""

from collections.abc import Sequence
from itertools import islice, product

import pytest

from orchestrator.core.options import Options
from orchestrator.core.policy.adaptive import Adaptive
from orchestrator.core.policy.decision import Decision, SequenceView, VerifyNodes, WaitUntil
from orchestrator.core.policy.strategies import STRATEGIES
from orchestrator.lab.simulate.acceptance import AcceptanceModel, ModelledLanguage
from orchestrator.lab.simulate.devices import Devices
from orchestrator.lab.simulate.workers import modelled_pipeline
from protocol.worker.pacing import DevicePace

TARGET = DevicePace(steps=((1, 0.053), (2, 0.057), (4, 0.067), (8, 0.079), (16, 0.115)), prefill_rate=300.0)
DRAFT = DevicePace(steps=((1, 0.007), (8, 0.009), (16, 0.012)), prefill_rate=2000.0)
CORES = Devices(target=TARGET, draft=DRAFT, baseline_draft=DRAFT, slow_down=2.0)
TOKENS = 200


def fixed(steps: int, nodes: int) -> type[Adaptive]:
    """Always so many growth steps, then the best so many nodes."""

    class Fixed(Adaptive):
        def decide_together(self, views: Sequence[SequenceView]) -> list[Decision]:
            (view,) = views
            ready = view.drafting and view.draft_ready_at <= view.now < view.ready_since + 0.2
            if ready and view.steps < steps:
                return [WaitUntil(view.now + 0.2, view.steps + 1 if view.resting else None)]
            deepest = view.tree.root.depth + view.room
            return [VerifyNodes([node for node in islice(view.tree.best(), nodes) if node.depth <= deepest])]

    return Fixed


def rate(accept: float, strategy: str = "adaptive") -> float:
    """Tokens a second of the third of three requests, whose figures are learned."""
    language = ModelledLanguage(AcceptanceModel(accept=accept, exponent=0.6, spread=1.5))
    options = Options(strategy=strategy, lookup="off", placement="shared")
    simulation = modelled_pipeline(options, language, CORES, kept=None)
    for number in (1, 2, 3):
        simulation.submit(number, TOKENS)
        began = simulation.now
        simulation.run()
    return TOKENS / (simulation.now - began)


@pytest.mark.thorough
@pytest.mark.parametrize("accept", [0.37, 0.5, 0.75])
def test_the_rule_reaches_the_best_fixed_plan(accept: float, monkeypatch: pytest.MonkeyPatch):
    found, plain = rate(accept), rate(accept, "ar")
    plans = []
    for steps, nodes in product((1, 2, 3), (1, 2, 4, 7)):
        monkeypatch.setitem(STRATEGIES, "adaptive", fixed(steps, nodes))
        plans.append(rate(accept))

    assert found >= 0.95 * max(plans)
    assert found > 1.05 * plain


def test_a_draft_that_is_never_right_costs_next_to_nothing():
    assert rate(0.0) >= 0.98 * rate(0.0, "ar")
