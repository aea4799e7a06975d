"""Drafters that read the target's features, with the real core, target worker and draft worker in virtual time: tokens
are those of plain decoding, and right features save rounds."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from draft_worker.engine import Batch, Engine
from draft_worker.engines.block import BlockEngine
from draft_worker.worker import DraftWorker
from orchestrator.core.options import Options
from orchestrator.lab.simulate.simulation import Simulation
from orchestrator.lab.simulate.worker_host import SimulatedWorker
from orchestrator.lab.simulate.workers import VirtualWorker
from protocol.inference.language_model import LanguageModel
from protocol.messages.base import Role
from protocol.messages.worker import Hello
from protocol.speculation.token_tree import Candidates
from protocol.worker.pacing import DevicePace
from target_worker.engine import TargetEngine
from target_worker.worker import TargetWorker
from tests.support.models.block_files import write_block
from tests.support.models.fitted_drafters import continued, features, fit_block
from tests.support.models.trained_drafters import block_form, block_network, ends_of, write_target
from tests.support.scripted_simulation import FixedPrompts, rounds

PROMPT = (5, 9, 2, 33, 5, 9, 2, 33, 5, 9)
LENGTH = 40
KINDS = ("z-lab", "z-lab, causal", "vanilla", "DFlash2")
TARGET_PACE = DevicePace(steps=((1, 0.020), (8, 0.024)), prefill_rate=1000.0)
DRAFT_PACE = DevicePace(steps=((1, 0.004), (8, 0.005)), prefill_rate=1000.0)


class FedEngine(BlockEngine):
    """Feeds the features of committed tokens before each growth step."""

    target_network: Any = None

    def evaluate_together(self, parts: Sequence[tuple[Any, Batch]]) -> list[list[Candidates]]:
        for sequence, batch in parts:
            if not batch.committed:
                self._feed(sequence)
        return super().evaluate_together(parts)

    def _feed(self, sequence: Any) -> None:
        missing = sequence.staleness
        if missing and self.features is not None:
            rows = features(self.target_network, sequence._tokens, self.features.outputs)[-missing:]
            sequence.feed(sequence.committed - missing, rows)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    folder = tmp_path_factory.mktemp("target")
    write_target(folder)
    return LanguageModel.load(folder)


@pytest.fixture(scope="module")
def drafts(target: LanguageModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, FedEngine]:
    """Drafters of each kind that know the target's own text."""
    root, text = tmp_path_factory.mktemp("drafts"), continued(target.network, PROMPT, len(PROMPT) + LENGTH)
    engines: dict[str, FedEngine] = {}
    for kind in KINDS:
        network = block_network(block_form(kind))
        fit_block(network, target.network, text)
        write_block(root / kind, network, ends_of(target.network), {})
        engines[kind] = engine = FedEngine.load(root / kind, target.folder)
        engine.target_network = target.network
    return engines


def run(target: LanguageModel, draft: Engine | None, temperature: float) -> Simulation:
    path = str(Path(target.folder))
    hello = Hello("target", "mlx", path, "qwen3", target.vocabulary, target.context, "", "cpu", 1, level="tree")

    def build(role: Role) -> SimulatedWorker:
        if role == "draft" and draft is not None:
            guesser = draft
            return VirtualWorker(lambda clock, pacer: DraftWorker(guesser, clock, pacer=pacer), DRAFT_PACE)
        engine = TargetEngine(target, prefill_chunk=64)
        return VirtualWorker(lambda clock, pacer: TargetWorker(engine, clock, hello, pacer), TARGET_PACE)

    strategy = "ar" if draft is None else "adaptive"
    simulation = Simulation(Options(strategy=strategy, fallback="fast"), FixedPrompts([PROMPT]), build, kept=None)
    simulation.start("target")
    if draft is not None:
        simulation.start("draft")
    simulation.submit(0, LENGTH, temperature)
    simulation.run()
    return simulation


def tokens(simulation: Simulation) -> list[list[int]]:
    return [client.tokens for client in simulation.clients.values()]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_plain_decoding(
    kind: str, temperature: float, target: LanguageModel, drafts: dict[str, FedEngine]
):
    alone, guessing = run(target, None, temperature), run(target, drafts[kind], temperature)

    assert tokens(guessing) == tokens(alone)
    if temperature == 0.0:
        assert len(rounds(guessing)) < 0.7 * len(rounds(alone))
