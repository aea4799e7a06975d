"""Laws of trained drafters as packages: the candidates are those of the drafter in MLX, whatever happens in between."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft_worker.coreml.arrays import Array
from draft_worker.coreml.conversion.graph import GraphParts
from draft_worker.coreml.conversion.lint import lint
from draft_worker.coreml.conversion.trained import convert_drafter, feature_scale
from draft_worker.coreml.examine import carry_out
from draft_worker.coreml.runtime.backends.apple import CoreMlRuntime
from draft_worker.coreml.runtime.backends.runtimes import ExecutorRuntime
from draft_worker.engine import Batch, Engine
from draft_worker.engines.coreml import drafter_engine
from protocol.contracts.coreml.conversion import Choices
from protocol.contracts.coreml.examination import (
    Agreed,
    ExaminationOrder,
    ExaminationReport,
    Predicted,
    Stage,
    Timed,
    Written,
)
from protocol.contracts.drafters.detection import read_drafter
from protocol.errors import InputError
from protocol.messages.sampling import Sampling
from protocol.speculation.token_tree import Candidates
from tests.support.models.core_ml_library import Library
from tests.support.models.drafter_packages import (
    EAGLE3_KINDS,
    KINDS,
    DrafterPackage,
    converted,
    write_drafter,
    write_package,
)
from tests.support.models.tiny_models import VOCABULARY
from tests.support.models.trained_drafters import write_target
from tests.support.twin_sequences import Twins

SAMPLINGS = {"greedy": Sampling(), "warm": Sampling(temperature=1.0, seed=5)}


class Packages(dict[str, DrafterPackage]):
    """By kind, each converted when it is first asked for."""

    def __init__(self, new_folder: Callable[[str], Path]) -> None:
        self._new_folder = new_folder

    def __missing__(self, kind: str) -> DrafterPackage:
        self[kind] = write_package(kind, self._new_folder("package"))
        return self[kind]


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Packages:
    return Packages(tmp_path_factory.mktemp)


def package_engine(package: DrafterPackage) -> Engine:
    """Without rounding to fp16, so that candidates can be compared one by one."""
    return drafter_engine("coreml", package.converted, ExecutorRuntime(package.converted, "fp32"))


class FedTwins(Twins):
    """Sequences that read the same features."""

    def __init__(self, engines: Sequence[Engine], sampling: Sampling, seed: int) -> None:
        assert engines[0].features is not None
        width = len(engines[0].features.outputs) * engines[0].features.width
        self.features = np.random.default_rng(seed).standard_normal((96, width)).astype(np.float32)
        one, other = (engine.open(sampling, VOCABULARY) for engine in engines)
        super().__init__(one, other, seed, sampling)

    def feed_from(self, first: int, stop: int) -> None:
        self.feed(first, self.features[first:stop])

    def feed_missing(self) -> None:
        """Mostly, and all of it."""
        if self.source.random() < 0.6:
            committed = self.sequences[0].committed
            self.feed_from(committed - self.sequences[0].staleness, committed)

    def grow(self, nodes: int) -> None:
        """One growth step of random nodes; their candidates must be alike."""
        assert_alike(*self.evaluate(nodes))


def assert_alike(ours: Sequence[Candidates], theirs: Sequence[Candidates]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        chances, expected = (dict(zip(each.tokens, each.probabilities, strict=True)) for each in (one, other))
        assert chances == pytest.approx(expected, abs=2e-3)


@pytest.mark.thorough
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_candidates_are_those_of_the_drafter_in_mlx(kind: str, sampling: str, packages: Packages):
    engines = package_engine(packages[kind]), packages[kind].own_engine()
    for seed in range(3):
        twins = FedTwins(engines, SAMPLINGS[sampling], seed)
        twins.prefill(30)
        twins.feed_from(0, 24)
        twins.grow(1)
        twins.feed_from(24, 30)
        for _ in range(6):
            twins.grow(twins.source.randrange(1, 4))
            twins.keep()
            twins.feed_missing()
        twins.truncate(20)
        twins.prefill(2)
        twins.grow(1)


class Counted(ExecutorRuntime):
    """Counts the decoder's calls, and those that read features."""

    calls = read = 0

    def predict(self, function: str, inputs: Mapping[str, Array]) -> dict[str, Array]:
        self.calls += function.startswith("width")
        self.read += function.startswith(("fuse", "context"))
        return super().predict(function, inputs)


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", EAGLE3_KINDS)
def test_sequences_side_by_side_share_calls_and_have_the_candidates_of_each_alone(kind: str, packages: Packages):
    package = packages[kind].converted
    together, apart = (Counted(package, "fp32") for _ in range(2))
    joint, alone = (drafter_engine("coreml", package, runtime) for runtime in (together, apart))
    walks = [
        FedTwins((joint, alone), sampling, seed) for seed, sampling in enumerate((*SAMPLINGS.values(), Sampling()))
    ]
    for walk, length in zip(walks, (8, 15, 22), strict=True):
        walk.prefill(length)
        walk.feed_from(0, length)
    before = together.calls
    assert before == apart.calls
    for _ in range(6):
        batches = [walk.batches(walk.source.randrange(1, 4)) for walk in walks]
        found = joint.evaluate_together(
            [(walk.sequences[0], one) for walk, (one, _) in zip(walks, batches, strict=True)]
        )
        for walk, (_, other), got in zip(walks, batches, found, strict=True):
            assert_alike(got, walk.sequences[1].evaluate(other))
            walk.keep()
            walk.feed_missing()

    assert together.calls - before <= (apart.calls - before) / 2


def test_a_tree_beyond_the_slots_has_nodes_without_candidates(packages: Packages):
    engine = package_engine(packages["reduced head"])
    sequence = engine.open(Sampling(), VOCABULARY)
    sequence.prefill(range(20))
    sequence.feed(0, np.ones((20, 3 * 32), np.float32))
    found = sequence.evaluate(Batch((), [*range(20)], [-1] * 20, 4))
    again = sequence.evaluate(Batch((), [1], [sequence.next_row - 1], 4))

    assert [bool(each.tokens) for each in found] == [True] * 12 + [False] * 8
    assert again == [Candidates([], [])]
    sequence.keep([sequence.next_row - 2], ())
    assert sequence.evaluate(Batch((), [1], [-1], 4))[0].tokens


@pytest.mark.parametrize("kind", ["reduced head", "vanilla", "DFlash2"])
def test_a_restarted_draft_adopts_its_kv_and_reads_only_the_features_behind_it(
    kind: str, packages: Packages, registry: Path
):
    package, tokens, batch = packages[kind].converted, [*range(3, 53)], Batch((), [5, 6], [-1, -1], 4)
    runtimes = [Counted(package, "fp32") for _ in range(2)]
    before, after = (
        drafter_engine("coreml", package, each, 7, os.getpid()).open(Sampling(), VOCABULARY) for each in runtimes
    )
    features = np.random.default_rng(1).standard_normal((50, feature_width(packages[kind]))).astype(np.float32)
    before.prefill(tokens)
    before.feed(0, features[:40])
    before.evaluate(batch)
    saved = before.save()
    assert saved is not None
    assert 38 <= saved.tokens <= 40

    assert after.adopt(saved, tokens[: saved.tokens]) == ""
    after.prefill(tokens[saved.tokens :])
    lacking = after.committed - after.staleness
    for sequence, first in ((before, 40), (after, lacking)):
        sequence.truncate(50)
        sequence.feed(first, features[first:])
    assert_alike(after.evaluate(batch), before.evaluate(batch))

    assert lacking >= 38
    assert [each.read for each in runtimes] == [3, 1]


def test_a_context_with_gaps_is_not_left_to_the_next_life(packages: Packages, registry: Path):
    engine = drafter_engine(
        "coreml", packages["DFlash2"].converted, ExecutorRuntime(packages["DFlash2"].converted), 7, os.getpid()
    )
    sequence = engine.open(Sampling(), VOCABULARY)
    sequence.prefill(range(60))
    sequence.feed(5, np.ones((50, feature_width(packages["DFlash2"])), np.float32))
    sequence.evaluate(Batch((), [5], [-1], 4))

    assert sequence.save() is None


def feature_width(package: DrafterPackage) -> int:
    conditioning = package.converted.package.conditioning
    assert conditioning is not None
    return len(conditioning.form.outputs) * conditioning.form.width


def test_copies_go_on_by_themselves(packages: Packages):
    for kind in ("reduced head", "vanilla", "DFlash2"):
        engine = package_engine(packages[kind])
        twins = FedTwins((engine, engine), Sampling(), 0)
        twins.prefill(20)
        twins.feed_from(0, 20)
        twins.grow(3)
        first, second = (each.reopen(12, Sampling(), VOCABULARY, exclusive=False) for each in twins.sequences)
        twins.truncate(0)
        second.truncate(12)
        assert_alike(*(each.evaluate(Batch((), [5, 6], [-1, -1], 4)) for each in (first, second)))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_a_drafter_leaves_the_neural_engine(kind: str, packages: Packages):
    findings = lint(packages[kind].converted.file)

    assert [finding for finding in findings if finding.severity == "error"] == []


@pytest.mark.parametrize("kind", ["reduced head", "gated", "DFlash2"])
def test_core_ml_is_called_by_the_library_s_signatures(
    kind: str, packages: Packages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    package = packages[kind].converted
    library = Library(monkeypatch, package)
    engines = [drafter_engine("coreml", package, runtime) for runtime in (CoreMlRuntime(package), library.executor)]
    twins = FedTwins(engines, Sampling(temperature=0.5, seed=2), 4)
    twins.prefill(30)
    twins.feed_from(0, 30)
    for _ in range(4):
        twins.grow(3)
        twins.keep()

    assert {made["function_name"] for made in library.made} == set(package.package.functions)
    assert {made["compute_units"].name for made in library.made} == {"CPU_AND_NE"}


class Shifted(ExecutorRuntime):
    """A device that makes keys and values, or vectors, of the wrong token's features."""

    def predict(self, function: str, inputs: Mapping[str, Array]) -> dict[str, Array]:
        outputs = super().predict(function, inputs)
        wrong = function.startswith(("fuse", "context"))
        return {name: np.roll(rows, 1, axis=2) for name, rows in outputs.items()} if wrong else outputs


@pytest.mark.parametrize("kind", ["reduced head", "gated", "DFlash2"])
def test_an_examination_compares_a_drafter_s_logits_on_the_device_with_the_executor_s(
    kind: str, packages: Packages, tmp_path: Path
):
    folder = packages[kind].converted.folder

    def reports(stage: Stage, runtime: type[ExecutorRuntime] = ExecutorRuntime) -> list[ExaminationReport]:
        order = ExaminationOrder(folder=str(folder), stage=stage, golden=str(tmp_path / "golden.npz"), predicts=6)
        return list(carry_out(order, lambda converted, _: runtime(converted)))

    assert reports("golden") == [Written()]
    right = reports("predict")
    wrong = reports("predict", Shifted)

    assert [each.deviation for each in right if isinstance(each, Agreed)] == [0.0] * len(WIDTHS[kind])
    assert [each.width for each in right if isinstance(each, Timed)] == WIDTHS[kind]
    assert [each.steady for each in right if isinstance(each, Predicted)] == [True]
    assert min(each.deviation or 0.0 for each in wrong if isinstance(each, Agreed)) > 0.11


WIDTHS = {"reduced head": [1, 4, 16], "gated": [4, 16], "DFlash2": [4, 16]}
"""Of the packages' functions: a block has 4 inputs."""


# Features beyond fp16 -----------------------------------------------------------------------------


@given(st.floats(0.001, 1e30))
def test_scaled_features_stay_eight_times_below_fp16_s_largest_number(largest: float):
    scale = feature_scale(largest)

    assert largest * scale <= 65_504 / 8
    assert scale == 1 or largest * scale > 65_504 / 16
    assert np.log2(scale) == int(np.log2(scale))


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["reduced head", "vanilla"])
def test_a_target_with_large_states_is_drafted_for_by_scaled_features(kind: str, tmp_path: Path):
    conditioning = loud_target(kind, tmp_path, 1e5).converted.package.conditioning

    assert conditioning is not None
    assert conditioning.largest > 65_504
    assert conditioning.scale == feature_scale(conditioning.largest)


def test_a_drafter_whose_features_overflow_is_refused(tmp_path: Path):
    """Its fc makes numbers of them that fp16 can't hold, whatever their scale."""
    with pytest.raises(InputError, match="fuse_32 deviates"):
        loud_target("reduced head", tmp_path, 3e4, fc=50.0)
    assert not (tmp_path / "package").exists()


def test_weights_that_overflow_by_the_scale_are_refused(tmp_path: Path):
    with pytest.raises(InputError, match="beyond fp16's range"):
        loud_target("reduced head", tmp_path, 3e4, fc=3e6)


def loud_target(kind: str, root: Path, factor: float, fc: float = 1e-4) -> DrafterPackage:
    """A package beside a target whose residual stream is `factor` times as large; fc's weights are times `fc`."""
    target = write_target(root / "target", num_hidden_layers=4)
    drafter = write_drafter(kind, root / "drafter", target)
    scaled(root / "target", "model.embed_tokens.weight", factor)
    scaled(drafter, "fc.weight", fc)
    return converted(drafter, root / "target", root / "package")


def scaled(folder: Path, name: str, factor: float) -> None:
    loaded: Any = mx.load(str(folder / "model.safetensors"))
    loaded[name] = (loaded[name].astype(mx.float32) * factor).astype(mx.float32)
    mx.eval(loaded)
    mx.save_safetensors(str(folder / "model.safetensors"), loaded, metadata={"format": "mlx"})


# Refusals -----------------------------------------------------------------------------------------


def test_a_package_that_computes_something_else_is_discarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rotate = GraphParts._rotate
    monkeypatch.setattr(GraphParts, "_rotate", lambda self, x, cosine, sine: rotate(self, x, sine, cosine))

    with pytest.raises(InputError, match="was discarded: its function context_32 deviates"):
        write_package("vanilla", tmp_path)
    assert not (tmp_path / "package").exists()


def test_a_drafter_needs_its_own_target(packages: Packages, tmp_path: Path):
    write_target(tmp_path / "other", num_hidden_layers=2)
    drafter = packages["reduced head"].drafter
    found = read_drafter(drafter)
    assert found is not None

    with pytest.raises(InputError, match="pass --target MODEL"):
        convert_drafter(found, drafter, None, tmp_path / "package", Choices())
    with pytest.raises(InputError, match="does not fit the target"):
        convert_drafter(found, drafter, tmp_path / "other", tmp_path / "package", Choices())
