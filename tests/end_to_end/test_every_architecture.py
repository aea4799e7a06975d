"""Every architecture, with the real core and a real target worker in virtual time: tokens are those of `ar` and of
mlx-lm's own loop, also behind a restart of the target, and right guesses save rounds."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step

from orchestrator.core.options import Options
from orchestrator.lab.simulate.simulation import Simulation
from orchestrator.lab.simulate.worker_host import SimulatedWorker
from orchestrator.lab.simulate.workers import VirtualWorker
from protocol.inference.language_model import LanguageModel
from protocol.messages.base import Role
from protocol.messages.worker import Hello
from protocol.worker.pacing import DevicePace
from target_worker.engine import TargetEngine
from target_worker.worker import TargetWorker
from tests.support.models.architectures import IMPOSSIBLE, UNSTABLE, modules, tiny
from tests.support.scripted_simulation import FixedPrompts, rounds

_PROMPTS = ((5, 9, 2, 33, 5, 9, 2, 33, 5, 9), (7, 8, 7, 8, 7, 8, 7))
_LENGTH = 64
_PACE = DevicePace(steps=((1, 0.020), (8, 0.024)), prefill_rate=1000.0)
_PREFIX_CACHE = 1 << 24


@cache
def _model(name: str) -> LanguageModel:
    return LanguageModel(tiny(name), Path(name))


def _run(name: str, strategy: str, temperature: float, killed: bool = False) -> Simulation:
    """Both prompts at once, longer than four windows at the end. Only prompt lookup guesses: random models repeat
    themselves."""
    model = _model(name)
    hello = Hello("target", "mlx", name, name, model.vocabulary, model.context, "", "cpu", 1, level=model.level)

    def build(role: Role) -> SimulatedWorker:
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


_KINDS = {
    "windows": "gemma3_text",
    "delta rule": "qwen3_next",
    "state space": "granitemoehybrid",
    "convolution": "lfm2",
    "several caches": "falcon_h1",
    "own positions": "gpt2",
    "chunks": "llama4",
    "states replaced": "rwkv7",
    "plain": "phi3small",
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("strategy", ["ssd", "adaptive"])
@pytest.mark.parametrize("name", ["gpt2", "llama4", "mamba", "rwkv7", "bailing_hybrid"])
def test_right_guesses_save_rounds(name: str, strategy: str, temperature: float):
    alone, guessing = (_run(name, each, temperature) for each in ("ar", strategy))

    assert _tokens(guessing) == _tokens(alone)
    if temperature == 0.0:
        assert len(rounds(guessing)) < 0.9 * len(rounds(alone))


@pytest.mark.thorough
def test_a_model_of_single_tokens_is_sent_no_guesses():
    assert len(rounds(_run("phi3small", "adaptive", 0.0))) == len(rounds(_run("phi3small", "ar", 0.0)))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in _KINDS.values() else pytest.mark.slow)
        for name in sorted(set(modules()) - set(IMPOSSIBLE))
    ],
)
def test_tokens_are_those_of_plain_decoding_and_of_mlx_lm(name: str):
    alone = _tokens(_run(name, "ar", 0.0))

    if name not in UNSTABLE:
        assert alone == [_by_mlx_lm(name, prompt) for prompt in _PROMPTS]
    assert _tokens(_run(name, "adaptive", 0.0, killed=True)) == alone
    assert _tokens(_run(name, "adaptive", 1.0, killed=True)) == _tokens(_run(name, "ar", 1.0))


def _by_mlx_lm(name: str, prompt: Sequence[int]) -> list[int]:
    steps = generate_step(mx.array(list(prompt)), _model(name).network, max_tokens=_LENGTH)
    return [int(token) for token, _ in steps]
