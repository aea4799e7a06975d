"""The real core and real workers with a target whose level is forced, in virtual time: its tokens are those of `ar`."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import pytest

from draft_worker.engines.mlx import MlxEngine
from draft_worker.worker import DraftWorker
from draft_worker.wrapped_engine import PacedEngine
from orchestrator.core.options import Options
from orchestrator.core.policy.strategies import STRATEGIES
from orchestrator.lab.simulate.simulation import Simulation
from orchestrator.lab.simulate.worker_host import SimulatedWorker
from orchestrator.lab.simulate.workers import VirtualWorker
from orchestrator.text.tokenizer import TextCodec
from protocol.inference.joint_forward import ForwardPart
from protocol.inference.language_model import LanguageModel
from protocol.inference.slots import PREFIX
from protocol.messages.base import Level, Role
from protocol.messages.worker import Hello
from protocol.worker.pacing import DevicePace
from target_worker.engine import TargetEngine
from target_worker.worker import TargetWorker
from tests.support.paths import DEMO_DRAFT, DEMO_TARGET
from tests.support.scripted_simulation import FixedPrompts, rounds

_PROMPTS = ("def quicksort(items):\n", "for i in range(10):\n    print(i)\nfor i in range(10):\n    print(")
_LENGTH = 24
_TARGET_PACE = DevicePace(steps=((1, 0.020), (8, 0.030)), prefill_rate=1000.0)
_DRAFT_PACE = DevicePace(steps=((1, 0.004), (8, 0.005)), prefill_rate=1000.0)


class StrictModel(LanguageModel):
    """Raises AssertionError for a forward beyond its level."""

    def evaluate_together(self, parts: Sequence[ForwardPart]) -> list[mx.array]:
        for part in parts:
            first = part.sequence.next_row
            path = [PREFIX, *range(first, first + len(part.tokens) - 1)]
            assert self.level == "tree" or list(part.parents) == path
            assert self.level != "plain" or len(part.tokens) == 1
        return super().evaluate_together(parts)


@cache
def _models() -> tuple[StrictModel, MlxEngine]:
    return StrictModel.load(DEMO_TARGET), MlxEngine.load(DEMO_DRAFT)


def _run(strategy: str, level: Level, temperature: float, **options: Any) -> Simulation:
    """Both prompts at once."""
    target, draft = _models()
    target.level = level
    hello = Hello(
        *("target", "mlx", "demo", "llama", target.vocabulary, target.context, draft.tokenizer, "cpu", 1), level=level
    )

    def build(role: Role) -> SimulatedWorker:
        if role == "draft":
            return VirtualWorker(
                lambda clock, pacer: DraftWorker(PacedEngine(draft, pacer, clock), clock, 512, pacer), _DRAFT_PACE
            )
        return VirtualWorker(lambda clock, pacer: TargetWorker(TargetEngine(target), clock, hello, pacer), _TARGET_PACE)

    codec = TextCodec(DEMO_TARGET)
    prompts = [tuple(codec.encode(text)) for text in _PROMPTS]
    simulation = Simulation(
        Options(strategy=strategy, draft_width=3, **options), FixedPrompts(prompts), build, kept=None
    )
    for role in ("target", "draft"):
        simulation.start(role)
    for number in range(len(prompts)):
        simulation.submit(number, _LENGTH, temperature)
    simulation.run()
    return simulation


@cache
def _reference(temperature: float) -> list[list[int]]:
    return _tokens(_run("ar", "tree", temperature))


def _tokens(simulation: Simulation) -> list[list[int]]:
    return [client.tokens for client in simulation.clients.values()]


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("strategy", [name for name, strategy in STRATEGIES.items() if strategy.drafts])
def test_tokens_do_not_depend_on_the_level(strategy: str, temperature: float):
    """And one path saves rounds."""
    chain, plain = (_run(strategy, level, temperature) for level in ("chain", "plain"))

    assert _tokens(chain) == _tokens(plain) == _reference(temperature)
    assert len(rounds(plain)) == len(_PROMPTS) * _LENGTH
    assert len(rounds(chain)) < 0.9 * len(rounds(plain))
