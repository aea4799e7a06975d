"""Every architecture, and drafters that read features, with the real core and real workers in virtual time: tokens are
those of `ar` and of mlx-lm's own loop, also behind a restart of the target, and right guesses save rounds."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step

from draft_worker.engine_interface import Batch, Engine
from draft_worker.engines.block import BlockEngine
from draft_worker.worker import DraftWorker
from orchestrator.core.options import Options
from orchestrator.lab.simulate.worker_host import SimulatedWorker
from orchestrator.lab.simulate.workers import VirtualWorker
from protocol.inference.language_model import LanguageModel
from protocol.messages.base import Role
from protocol.messages.worker import Hello
from protocol.speculation.token_tree import Candidates
from protocol.worker.pacing import DevicePace
from target_worker.engine import TargetEngine
from target_worker.worker import TargetWorker
from tests.support.models.architectures import IMPOSSIBLE, UNSTABLE, modules, tiny
from tests.support.models.block_files import write_block
from tests.support.models.fitted_drafters import continued, features, fit_block
from tests.support.models.trained_drafters import block_form, block_network, ends_of, write_target
from tests.support.scripted_simulation import FixedPrompts, rounds
from tests.support.simulation import Simulation

_PROMPTS = ((5, 9, 2, 33, 5, 9, 2, 33, 5, 9), (7, 8, 7, 8, 7, 8, 7))
_LENGTH = 64
_PACE = DevicePace(steps=((1, 0.020), (8, 0.024)), prefill_rate=1000.0)
_DRAFT_PACE = DevicePace(steps=((1, 0.004), (8, 0.005)), prefill_rate=1000.0)
_PREFIX_CACHE = 1 << 24


@cache
def _model(name: str) -> LanguageModel:
    return LanguageModel(tiny(name), Path(name))


def _run(
    model: LanguageModel, strategy: str, temperature: float, killed: bool = False, draft: Engine | None = None
) -> Simulation:
    """Both prompts at once, longer than four windows at the end; with a draft the first one alone. Without one only
    prompt lookup guesses: random models repeat themselves."""
    path = str(model.folder)
    hello = Hello("target", "mlx", path, path, model.vocabulary, model.context, "", "cpu", 1, level=model.level)

    def build(role: Role) -> SimulatedWorker:
        if role == "draft" and (guesser := draft) is not None:
            return VirtualWorker(lambda clock, pacer: DraftWorker(guesser, clock, pacer=pacer), _DRAFT_PACE)
        engine = TargetEngine(model, prefill_chunk=3)
        return VirtualWorker(lambda clock, pacer: TargetWorker(engine, clock, hello, pacer, _PREFIX_CACHE), _PACE)

    simulation = Simulation(Options(strategy=strategy, fallback="fast"), FixedPrompts(_PROMPTS), build, kept=None)
    simulation.start("target")
    if draft is not None:
        simulation.start("draft")
    for number in range(len(_PROMPTS) if draft is None else 1):
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
    alone, guessing = (_run(_model(name), each, temperature) for each in ("ar", strategy))

    assert _tokens(guessing) == _tokens(alone)
    if temperature == 0.0:
        assert len(rounds(guessing)) < 0.9 * len(rounds(alone))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in _KINDS.values() else pytest.mark.slow)
        for name in sorted(set(modules()) - set(IMPOSSIBLE))
    ],
)
def test_tokens_are_those_of_plain_decoding_and_of_mlx_lm(name: str):
    model = _model(name)
    alone = _tokens(_run(model, "ar", 0.0))

    if name not in UNSTABLE:
        assert alone == [_by_mlx_lm(model, prompt) for prompt in _PROMPTS]
    assert _tokens(_run(model, "adaptive", 0.0, killed=True)) == alone
    assert _tokens(_run(model, "adaptive", 1.0, killed=True)) == _tokens(_run(model, "ar", 1.0))


def _by_mlx_lm(model: LanguageModel, prompt: Sequence[int]) -> list[int]:
    steps = generate_step(mx.array(list(prompt)), model.network, max_tokens=_LENGTH)
    return [int(token) for token, _ in steps]


# Drafters that read features -----------------------------------------------------------------------


class FedEngine(BlockEngine):
    """Feeds the features of committed tokens before each growth step."""

    target_network: Any = None

    def evaluate_together(self, parts: Sequence[tuple[Any, Batch]]) -> list[list[Candidates]]:
        for sequence, batch in parts:
            missing = 0 if batch.committed else sequence.staleness
            if missing and self.features is not None:
                rows = features(self.target_network, sequence._tokens, self.features.outputs)[-missing:]
                sequence.feed(sequence.committed - missing, rows)
        return super().evaluate_together(parts)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    folder = tmp_path_factory.mktemp("target")
    write_target(folder)
    return LanguageModel.load(folder)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["z-lab", "z-lab, causal", "vanilla", "DFlash2"])
def test_a_drafter_that_knows_the_target_s_text_saves_rounds_and_changes_no_token(
    kind: str, target: LanguageModel, tmp_path: Path
):
    network = block_network(block_form(kind))
    fit_block(network, target.network, continued(target.network, _PROMPTS[0], len(_PROMPTS[0]) + _LENGTH))
    write_block(tmp_path / "draft", network, ends_of(target.network), {})
    draft = FedEngine.load(tmp_path / "draft", Path(target.folder))
    draft.target_network = target.network

    for temperature in (0.0, 0.7, 1.0):
        alone, guessing = _run(target, "ar", temperature), _run(target, "adaptive", temperature, draft=draft)
        assert _tokens(guessing) == _tokens(alone)[:1]
        if temperature == 0.0:
            own = [each for each in rounds(alone) if each[0] == min(guessing.clients)]
            assert len(rounds(guessing)) < 0.7 * len(own)
