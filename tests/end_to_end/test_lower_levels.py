"""Models below the level of trees, with the real core and a real target worker in virtual time: tokens are those of
`ar`, also behind a restart of the target, and right guesses save rounds."""

from functools import cache
from pathlib import Path

import pytest

from orchestrator.core.options import Options
from orchestrator.tools.simulate.modelled_worker import ModelledWorker
from orchestrator.tools.simulate.simulation import Simulation
from protocol.inference.language_model import LanguageModel
from protocol.messages.base import Role
from protocol.messages.worker import Hello
from protocol.worker.pacing import DevicePace
from target_worker.engine import TargetEngine
from target_worker.worker import TargetWorker
from tests.support.models.architectures import tiny
from tests.support.virtual_workers import FixedPrompts, VirtualWorker, rounds

_PROMPTS = ((5, 9, 2, 33, 5, 9, 2, 33, 5, 9), (7, 8, 7, 8, 7, 8, 7))
_LENGTH = 40
_PACE = DevicePace(steps=((1, 0.020), (8, 0.024)), prefill_rate=1000.0)
_PREFIX_CACHE = 1 << 24


@cache
def _model(name: str) -> LanguageModel:
    return LanguageModel(tiny(name), Path(name))


def _run(name: str, strategy: str, temperature: float, killed: bool = False) -> Simulation:
    """Both prompts at once. Only prompt lookup guesses: random models repeat themselves."""
    model = _model(name)
    hello = Hello("target", "mlx", name, name, model.vocabulary, model.context, "", "cpu", 1, level=model.level)

    def build(role: Role) -> ModelledWorker:
        engine = TargetEngine(model, prefill_chunk=3)
        return VirtualWorker(lambda clock, pacer: TargetWorker(engine, clock, hello, pacer, _PREFIX_CACHE), _PACE)

    simulation = Simulation(Options(strategy=strategy, fallback="fast"), FixedPrompts(_PROMPTS), build, kept=None)
    simulation.start("target")
    for number in range(len(_PROMPTS)):
        simulation.submit(number, _LENGTH, temperature)
    if killed:
        simulation.run_until(0.3)
        assert simulation.kill("target")
        simulation.start("target")
    simulation.run()
    return simulation


def _tokens(simulation: Simulation) -> list[list[int]]:
    return [client.tokens for client in simulation.clients.values()]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("strategy", ["ssd", "adaptive"])
@pytest.mark.parametrize("name", ["gpt2", "llama4", "mamba", "rwkv7", "phi3small"])
def test_tokens_are_those_of_plain_decoding(name: str, strategy: str, temperature: float):
    alone, guessing, killed = (
        _run(name, "ar", temperature),
        _run(name, strategy, temperature),
        _run(name, strategy, temperature, killed=True),
    )

    assert _tokens(guessing) == _tokens(killed) == _tokens(alone)
    if _model(name).level == "plain":
        assert len(rounds(guessing)) == len(rounds(alone))
    elif temperature == 0.0:
        assert len(rounds(guessing)) < 0.9 * len(rounds(alone))
