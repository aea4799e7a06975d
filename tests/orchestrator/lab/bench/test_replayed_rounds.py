"""A replayed run has the rounds of the real one: the same accepted tokens, round by round, and the same texts.

Our strategies run the real orchestrator core and the real workers in virtual time, so that every schedule is
deterministic. mlx-lm's loops run in their own process.
"""

from functools import cache

import pytest

from draft_worker.engines.mlx import MlxEngine
from draft_worker.worker import DraftWorker
from orchestrator.core.options import Options, StrategyName
from orchestrator.lab.simulate.worker_host import SimulatedWorker
from orchestrator.lab.simulate.workers import VirtualWorker
from orchestrator.text.tokenizer import TextCodec
from protocol.contracts.model_folder import ModelFolder
from protocol.inference.language_model import LanguageModel
from protocol.messages.base import Role
from protocol.messages.worker import Hello
from protocol.worker.pacing import DevicePace
from protocol.worker.recorded_texts import RecordedTarget, RecordedText, RecordedTexts
from target_worker.engine import TargetEngine
from target_worker.recorded import RecordedEngine, RecordedModel
from target_worker.worker import TargetWorker
from tests.support.paths import DEMO_DRAFT, DEMO_TARGET
from tests.support.scripted_simulation import FixedPrompts, rounds
from tests.support.simulation import Simulation

_PROMPTS = ("def quicksort(items):\n", "class Stack:\n    def push(self, item):\n")
_LENGTH = 24
_TARGET_PACE = DevicePace(steps=((1, 0.020), (8, 0.034)), prefill_rate=1000.0)
_DRAFT_PACE = DevicePace(steps=((1, 0.008), (8, 0.010)), prefill_rate=1000.0)


@cache
def _prompts() -> list[tuple[int, ...]]:
    codec = TextCodec(DEMO_TARGET)
    return [tuple(codec.encode(text)) for text in _PROMPTS]


@cache
def _models() -> tuple[LanguageModel, MlxEngine]:
    return LanguageModel.load(DEMO_TARGET), MlxEngine.load(DEMO_DRAFT)


@cache
def _run(strategy: StrategyName, temperature: float, texts: RecordedTexts | None = None) -> Simulation:
    """All prompts, one after the other. With `texts` the target replays them."""
    target, draft = _models()
    hello = Hello("target", "mlx", "demo", "llama", target.vocabulary, target.context, draft.tokenizer, "cpu", 1)

    def build(role: Role) -> SimulatedWorker:
        if role == "draft":
            return VirtualWorker(lambda clock, pacer: DraftWorker(draft, clock, 512, pacer), _DRAFT_PACE)
        engine = TargetEngine(target) if texts is None else RecordedEngine(RecordedModel(DEMO_TARGET, texts), texts)
        return VirtualWorker(lambda clock, pacer: TargetWorker(engine, clock, hello, pacer), _TARGET_PACE)

    simulation = Simulation(Options(strategy=strategy, draft_width=3), FixedPrompts(_prompts()), build, kept=None)
    for role in ("target",) if strategy == "ar" else ("target", "draft"):
        simulation.start(role)
    for number in range(len(_PROMPTS)):
        simulation.submit(number, _LENGTH, temperature)
        simulation.run()
    return simulation


@cache
def _recorded(temperature: float) -> RecordedTexts:
    """The texts of target-only decoding."""
    clients = _run("ar", temperature).clients.values()
    texts = [
        RecordedText(
            prompt=client.task.tokens,
            temperature=temperature,
            seed=client.task.sampling.seed,
            tokens=tuple(client.tokens),
        )
        for client in clients
    ]
    return RecordedTexts(_header(len(texts)), texts)


def _header(texts: int) -> RecordedTarget:
    target, _ = _models()
    fingerprint = ModelFolder(DEMO_TARGET).fingerprint
    return RecordedTarget(
        model_fingerprint=fingerprint, vocabulary=target.vocabulary, context=target.context, texts=texts
    )


@pytest.mark.thorough
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("strategy", ["ar", "sd", "ssd", "adaptive"])
def test_a_replayed_run_has_the_rounds_of_the_real_one(strategy: StrategyName, temperature: float):
    texts = _recorded(temperature)

    real, replayed = _run(strategy, temperature), _run(strategy, temperature, texts)

    assert [tuple(client.tokens) for client in replayed.clients.values()] == [text.tokens for text in texts.texts]
    assert rounds(replayed) == rounds(real)
    assert replayed.now == real.now


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["sd", "ssd", "adaptive"])
def test_the_compared_rounds_accept_tokens(strategy: StrategyName):
    accepted = [count for _, count, _ in rounds(_run(strategy, 0.0, _recorded(0.0)))]

    assert sum(accepted) > len(accepted) / 2
