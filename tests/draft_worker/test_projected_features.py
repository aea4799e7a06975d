"""Laws of features that the target has projected: a drafter guesses from them what it guesses from the raw ones, also
where some of a forward are raw."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from draft_worker.conditioned.engine import ConditionedEngine
from draft_worker.drafters.eagle3 import Eagle3, read_eagle3, write_eagle3
from draft_worker.drafters.peagle import PeagleRunner
from draft_worker.engine_interface import Batch
from draft_worker.engines import eagle3
from draft_worker.engines.block import BlockEngine
from protocol.contracts.drafters.description import Eagle3Form
from protocol.kv.arena_header import ElementType
from protocol.messages.features import FeatureForm
from protocol.messages.sampling import Sampling
from protocol.worker.process import WorkerSetup
from target_worker.feature_rings import ProjectionIntake, projected
from tests.support.models import eagle3_folders
from tests.support.models.tiny_models import VOCABULARY
from tests.support.models.tokenizer_files import write_tokenizer
from tests.support.models.trained_drafters import WIDTH, loud, random_features, write_block_folder, write_target

TOKENS = [3, 11, 20, 2, 3, 8, 13, 5, 7, 30, 4, 6]


def dflash(kind: str) -> Callable[[Path], Any]:
    def load(folder: Path) -> BlockEngine:
        write_block_folder(folder / "drafter", kind, write_target(folder / "target"))
        return BlockEngine.load(folder / "drafter", folder / "target")

    return load


def eagle(**variant: Any) -> Callable[[Path], ConditionedEngine]:
    def load(folder: Path) -> ConditionedEngine:
        write_target(folder / "target")
        mx.random.seed(3)
        form = Eagle3Form(
            outputs=(0, 1),
            width=WIDTH,
            inner=48,
            heads=4,
            kv_heads=2,
            head_width=8,
            vocabulary=VOCABULARY,
            head_size=VOCABULARY,
            output_width=WIDTH,
            own_head=False,
            **variant,
        )
        write_eagle3(folder / "drafter", loud(Eagle3(form)), mx.float32)
        model, target = str(folder / "drafter"), str(folder / "target")
        return eagle3.load(WorkerSetup(address="", epoch=0, incarnation=0, engine="eagle3", model=model, target=target))

    return load


def peagle(folder: Path) -> BlockEngine:
    write_tokenizer(folder)
    return BlockEngine(folder, PeagleRunner(read_eagle3(eagle3_folders.peagle(folder / "drafter"))), folder)


ENGINES: dict[str, Callable[[Path], Any]] = {
    "DFlash": dflash("z-lab"),
    "DSpark": dflash("vanilla"),
    "DFlash2": dflash("DFlash2"),
    "EAGLE-3": eagle(),
    "EAGLE-3 with a bias": eagle(biases=("fc",)),
    "P-EAGLE": peagle,
}


def by_target(engine: Any, rows: np.ndarray) -> np.ndarray:
    """What the target would make of these rows."""
    assert engine.matrix is not None
    intake = ProjectionIntake(engine.features)
    while (wanted := intake.wanted) is not None:
        intake.add(engine.matrix.answer(wanted))
    assert intake.matrix is not None
    return projected(rows, ElementType.FLOAT32, intake.matrix)


@pytest.mark.parametrize("load", ENGINES.values(), ids=ENGINES)
def test_guesses_from_projected_features_are_those_from_raw_ones(load: Callable[[Path], Any], tmp_path: Path):
    engine = load(tmp_path)
    form = engine.features
    rows = random_features(len(TOKENS), form.joined)
    small = by_target(engine, rows)
    assert small.shape == (len(TOKENS), form.elements)
    assert form.elements < form.joined
    fed: dict[str, list[tuple[int, np.ndarray]]] = {
        "raw": [(0, rows)],
        "projected": [(0, small)],
        "first raw": [(0, rows[:5]), (5, small[5:])],
        "first projected": [(0, small[:7]), (7, rows[7:])],
    }
    found = {}
    for name, parts in fed.items():
        sequence = engine.open(Sampling(temperature=0.0), engine.vocabulary)
        sequence.prefill(TOKENS)
        for first, part in parts:
            sequence.feed(first, part)
        assert sequence.staleness == 0
        (candidates,) = sequence.evaluate(Batch([], [9], [-1], 6))
        found[name] = candidates

    for name in fed:
        assert list(found[name].tokens) == list(found["raw"].tokens)
        np.testing.assert_allclose(found[name].probabilities, found["raw"].probabilities, atol=1e-3)


def test_a_norm_before_the_projection_keeps_features_raw(tmp_path: Path):
    engine = eagle(norm_before_fc=True)(tmp_path)

    assert engine.matrix is None
    assert engine.features == FeatureForm((0, 1), WIDTH)
