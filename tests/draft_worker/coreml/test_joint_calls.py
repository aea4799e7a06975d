"""Laws of calls that evaluate rows of several sequences: each sequence's candidates are those of a call of its own.

What overflows fp16 in one row harms that row alone, and what the host allocates does not grow with the context.
"""

import random
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from draft_worker.coreml.converted import Converted
from draft_worker.coreml.package import Array
from draft_worker.coreml.runtime.calls import PackageForward
from draft_worker.coreml.runtime.joint_memory import _IDLE_STEPS, JointMemory
from draft_worker.coreml.runtime.memory import CachePool, HostMemory
from draft_worker.coreml.runtime.runtimes import ExecutorRuntime
from draft_worker.engine_interface import Batch
from draft_worker.engines.coreml import CoreMlEngine, CoreMlSequence
from draft_worker.worker import DraftWorker
from protocol.inference.slots import PREFIX
from protocol.messages.base import NodeId, RequestId
from protocol.messages.plans import BestFirst
from protocol.messages.worker import Grow, Start
from protocol.speculation.token_tree import Candidates
from tests.draft_worker.coreml.test_engine import FILTERED, SAMPLED
from tests.support.models.coreml_runs import CONTEXT, convert, tiny, tiny_of
from tests.support.models.tiny_models import VOCABULARY
from tests.support.twin_sequences import GREEDY, Twins

LONG = 2 * CONTEXT
MODELS: dict[str, Callable[[], Any]] = {
    "attention": lambda: tiny("qwen2"),
    "sliding windows": lambda: tiny_of("gemma3_text", sliding_window_pattern=2),
    "short convolutions": lambda: tiny_of("lfm2", layers=3, layer_types=["conv", "full_attention", "conv"]),
}


class Counted(ExecutorRuntime):
    """Counts calls."""

    calls = 0

    def predict(self, *arguments: Any, **options: Any) -> Any:
        self.calls += 1
        return super().predict(*arguments, **options)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    return convert(tiny("qwen2"), tmp_path_factory.mktemp("model") / "converted")


def engine(converted: Converted) -> tuple[CoreMlEngine, Counted]:
    runtime = Counted(converted.file, "fp32")
    return CoreMlEngine(converted, runtime), runtime


def assert_equal(got: list[Candidates], want: list[Candidates]) -> None:
    assert [each.tokens for each in got] == [each.tokens for each in want]
    for one, other in zip(got, want, strict=True):
        assert one.probabilities == pytest.approx(other.probabilities, abs=1e-4)


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", MODELS)
def test_random_walks_side_by_side_are_those_of_each_sequence_alone(name: str, tmp_path: Path):
    converted = convert(MODELS[name](), tmp_path / "model", context=LONG)
    (joint, runtime), (alone, _) = engine(converted), engine(converted)
    walks = [
        Twins(joint.open(sampling, VOCABULARY), alone.open(sampling, VOCABULARY), seed, sampling)
        for seed, sampling in enumerate((GREEDY, SAMPLED, FILTERED))
    ]
    for walk, count in zip(walks, (3, 11, 30), strict=True):
        walk.prefill(count)
    for step in range(12):
        taking = [walk for number, walk in enumerate(walks) if (step + number) % 4]
        batches = [walk.batches(1 + step % 3, committed=0 if walk.nodes else step % 3) for walk in taking]
        made = runtime.calls
        found = joint.evaluate_together(
            [(cast(CoreMlSequence, walk.sequences[0]), one) for walk, (one, _) in zip(taking, batches, strict=True)]
        )
        assert runtime.calls == made + 1
        for walk, (_, other), got in zip(taking, batches, found, strict=True):
            assert_equal(got, walk.sequences[1].evaluate(other))
            walk.keep()
        # Between joint calls, the sequences have calls of their own, and lose tokens.
        for walk in walks:
            if not walk.nodes and walk.source.random() < 0.5:
                length = len(walk.tokens) - 2
                walk.truncate(length)
                walk.prefill(walk.source.choice([1, 5]))
            elif walk.source.random() < 0.3:
                assert_equal(*walk.evaluate(2))
                walk.keep()


def filled(engine: CoreMlEngine, *lengths: int) -> list[Any]:
    source = random.Random(4)
    sequences = []
    for length in lengths:
        sequences.append(engine.open(GREEDY, VOCABULARY))
        sequences[-1].prefill([source.randrange(VOCABULARY) for _ in range(length)])
    return sequences


def batch(count: int) -> Batch:
    return Batch((), [7] * count, [PREFIX] * count, 4)


@pytest.mark.parametrize(
    ("lengths", "rows", "calls"),
    [((20, 30), (8, 8), 1), ((20, 30), (8, 9), 2), ((40, 40), (8, 8), 1), ((41, 40), (8, 8), 2)],
)
def test_sequences_share_a_call_as_far_as_its_rows_and_slots_suffice(
    short: Converted, lengths: tuple[int, ...], rows: tuple[int, ...], calls: int
):
    joint, runtime = engine(short)
    sequences = filled(joint, *lengths)
    made = runtime.calls

    assert joint.joins(list(zip(sequences, rows, strict=True))) is (calls == 1)
    found = joint.evaluate_together([(each, batch(count)) for each, count in zip(sequences, rows, strict=True)])

    assert [len(each) for each in found] == list(rows)
    assert runtime.calls == made + calls


def test_numbers_that_are_none_stay_with_the_sequence_that_has_them(short: Converted):
    joint, _ = engine(short)
    (spoilt,), (first,), (alone,) = filled(joint, 20), filled(joint, 30), filled(joint, 30)
    spoilt.host.kv[:, :, 3] = np.nan

    _, found = joint.evaluate_together([(spoilt, batch(2)), (first, batch(2))])

    assert_equal(found, alone.evaluate(batch(2)))


class Overflowing(ExecutorRuntime):
    """Its first call overflows, as fp16 sums of a device do."""

    value = np.inf

    def predict(self, function: str, inputs: Mapping[str, Array]) -> dict[str, Array]:
        outputs = super().predict(function, inputs)
        if np.isfinite(self.value):
            return outputs
        outputs["kv_new"] = np.full_like(outputs["kv_new"], self.value)
        self.value = 0.0
        return outputs


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_row_that_overflowed_blinds_no_token_that_does_not_see_it(value: float, short: Converted):
    runtime = Overflowing(short.file)
    runtime.value = value
    package = short.package
    memory = HostMemory(CachePool(package))
    forward = PackageForward(package, short.tables, runtime)
    forward.run([memory.rows(memory.slots.add([5], [PREFIX]))])
    memory.slots.keep([], ())

    (number,) = memory.slots.add([7], [PREFIX])
    assert np.isfinite(forward.evaluate([memory.rows([number])])[:, : package.head_rows]).all()


def memory(converted: Converted, tokens: int) -> HostMemory:
    made = HostMemory(CachePool(converted.package))
    made.slots.adopt(tokens)
    return made


def test_a_sequence_that_was_in_no_recent_call_gives_up_its_slots(short: Converted):
    joint = JointMemory(short.package)
    gone, first, second, late = (memory(short, tokens) for tokens in (40, 20, 20, 50))

    def fits(*memories: HostMemory) -> bool:
        return joint.fits([(each, each.slots.taken) for each in memories])

    def call(*memories: HostMemory) -> None:
        joint.call([each.rows([]) for each in memories])

    call(gone, first)
    for _ in range(_IDLE_STEPS):
        assert not fits(first, late)
        call(first, second)

    assert fits(first, late)
    call(first, late)
    assert fits(second, late)
    assert not fits(gone, late)


def test_sequences_that_have_ended_keep_later_ones_apart_for_some_steps_only(short: Converted):
    joint, _ = engine(short)
    ended, later = filled(joint, 40, 40), filled(joint, 40, 40)
    joint.evaluate_together([(each, batch(1)) for each in ended])

    for _ in range(_IDLE_STEPS):
        assert not joint.joins([(each, 1) for each in later])
        joint.evaluate_together([(later[0], batch(1))])
        later[0].keep((), ())

    assert joint.joins([(each, 1) for each in later])


def test_one_growth_step_of_the_worker_grows_as_many_trees_as_a_call_takes(short: Converted):
    draft, runtime = engine(short)
    worker = DraftWorker(draft, lambda: 0.0)
    for number in range(1, 6):
        tokens = tuple(range(number, number + 4))
        list(worker.handle(Start(RequestId(number), 0, tokens, NodeId(number), GREEDY, BestFirst(4, 4))))
    steps: list[tuple[int, list[RequestId]]] = []
    for _ in range(6):
        made = runtime.calls
        grown = [reply.request for reply in worker.work() if isinstance(reply, Grow)]
        steps.append((runtime.calls - made, grown))

    assert {calls for calls, _ in steps} == {1}
    # The root's forward has four rows: three committed tokens and the root.
    assert steps[0][1] == [1, 2, 3, 4]
    assert {sequence for _, grown in steps[1:3] for sequence in grown} == {1, 2, 3, 4, 5}


class Constant(ExecutorRuntime):
    """Returns the arrays of its first call again."""

    def predict(self, function: str, inputs: Mapping[str, Array]) -> dict[str, Array]:
        if not hasattr(self, "outputs"):
            self.outputs = super().predict(function, inputs)
        return self.outputs


def peak(folder: Path, context: int) -> int:
    """Peak bytes that the host allocates in a call behind a nearly full context."""
    converted = convert(tiny("qwen2", max_position_embeddings=8192), folder, widths=(8,), context=context)
    forward = PackageForward(converted.package, converted.tables, Constant(converted.file))
    held = memory(converted, context - 16)

    def call() -> None:
        forward.evaluate([held.rows(held.slots.add(range(8), [PREFIX] * 8))])
        held.slots.keep([], ())

    call()
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_no_allocation_of_a_call_grows_with_the_context(tmp_path: Path):
    assert abs(peak(tmp_path / "long", 8192) - peak(tmp_path / "short", 512)) < 512
