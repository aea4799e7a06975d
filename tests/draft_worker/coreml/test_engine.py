"""Laws of the draft on a converted model: candidates equal those of MLX after any sequence of operations."""

import random
from typing import Any

import numpy as np
import pytest

from draft_worker.coreml.converted import Converted
from draft_worker.coreml.runtime.runtimes import ExecutorRuntime
from draft_worker.engine_interface import Batch
from draft_worker.engines.coreml import CoreMlEngine
from draft_worker.engines.mlx import MlxEngine
from protocol.inference.language_model import LanguageModel
from protocol.messages.sampling import Sampling
from protocol.speculation.token_tree import Candidates
from tests.support.models.coreml_runs import CONTEXT, convert, tiny
from tests.support.models.tiny_models import VOCABULARY
from tests.support.twin_sequences import GREEDY, Twins

HEAD = np.array([0, 2, 3, 11, 12, 30, 31, 44, 50, VOCABULARY - 1], np.int32)
SAMPLED = Sampling(temperature=0.8, seed=5)
FILTERED = Sampling(temperature=0.8, seed=5, top_p=0.9, repetition_penalty=1.2)
PENALISED = Sampling(temperature=0.8, seed=5, frequency_penalty=1.5, presence_penalty=2.0)


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    return convert(tiny("qwen2"), tmp_path_factory.mktemp("model") / "converted")


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    """The same model, whose head has only some tokens."""
    return convert(tiny("qwen2"), tmp_path_factory.mktemp("short") / "converted", head_tokens=HEAD)


def engine(converted: Converted) -> CoreMlEngine:
    """An engine in fp32, for comparison with MLX."""
    return CoreMlEngine(converted, ExecutorRuntime(converted.file, "fp32"))


@pytest.fixture(scope="module")
def reference() -> MlxEngine:
    return MlxEngine(LanguageModel(tiny("qwen2")), "")


def assert_alike(got: list[Candidates], want: list[Candidates]) -> None:
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert one.tokens[0] == other.tokens[0]
        chances = dict(zip(one.tokens, one.probabilities, strict=True))
        for token, chance in zip(other.tokens, other.probabilities, strict=True):
            assert chances.get(token, chance) == pytest.approx(chance, abs=0.02)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, FILTERED, PENALISED])
@pytest.mark.parametrize(
    ("head", "vocabulary"),
    [(None, VOCABULARY), (HEAD, VOCABULARY - 1), (HEAD, VOCABULARY), (HEAD, VOCABULARY + 61)],
    ids=["whole head", "short head", "short head of all", "short head of more"],
)
def test_a_random_walk_gives_the_candidates_of_mlx_with_the_same_head(
    converted: Converted, short: Converted, head: Any, vocabulary: int, sampling: Sampling
):
    ours = engine(converted if head is None else short)
    one, other = (each.open(sampling, vocabulary) for each in (ours, MlxEngine(LanguageModel(tiny("qwen2")), "", head)))
    walk = Twins(one, other, seed=6, sampling=sampling)
    walk.prefill(21)
    for step in range(10):
        got, want = walk.evaluate(walk.source.choice([1, 3, 6, 17]), committed=0 if walk.nodes else step % 3)
        assert_alike(got, want)
        assert head is None or all(set(each.tokens) <= set(head.tolist()) for each in got)
        walk.keep()
    assert one.committed == other.committed == len(walk.tokens)
    # A call may have committed tokens alone.
    walk.truncate(20)
    assert_alike(*walk.evaluate(3, committed=converted.package.widths[-1]))


def test_a_row_without_a_slot_can_still_be_committed(converted: Converted, reference: MlxEngine):
    one, other = (each.open(GREEDY, VOCABULARY) for each in (engine(converted), reference))
    firsts = []
    for sequence in (one, other):
        sequence.prefill([token % VOCABULARY for token in range(CONTEXT - 20)])
        firsts.append(sequence.next_row)
    batch = Batch((), [*range(30)], [-1] * 30, 4)
    without = [index for index, found in enumerate(one.evaluate(batch)) if not found.tokens]
    other.evaluate(batch)
    for sequence, first in zip((one, other), firsts, strict=True):
        sequence.keep([first + without[0]], ())

    assert one.committed == other.committed == CONTEXT - 19
    batch = Batch((), [7], [-1], 4)
    assert_alike(one.evaluate(batch), other.evaluate(batch))


def test_tokens_reach_to_the_end_of_the_context(converted: Converted, reference: MlxEngine):
    one, other = (each.open(GREEDY, VOCABULARY) for each in (engine(converted), reference))
    source = random.Random(6)
    tokens = [source.randrange(VOCABULARY) for _ in range(CONTEXT)]
    for sequence in (one, other):
        sequence.prefill(tokens[:70])
    for position in range(70, CONTEXT):
        rows = [sequence.next_row for sequence in (one, other)]
        found = [sequence.evaluate(Batch((), [tokens[position]], [-1], 4)) for sequence in (one, other)]
        assert_alike(*found)
        for sequence, row in zip((one, other), rows, strict=True):
            sequence.keep([row], ())


# Restarts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exclusive", [True, False])
def test_another_request_reuses_the_kv_of_a_sequence(converted: Converted, reference: MlxEngine, exclusive: bool):
    first, other = engine(converted).open(GREEDY, VOCABULARY), reference.open(SAMPLED, VOCABULARY)
    tokens = [random.Random(7).randrange(VOCABULARY) for _ in range(30)]
    first.prefill(tokens)
    first.evaluate(Batch([], [1, 2, 3], [-1, -1, -1], 4))
    again = first.reopen(22, SAMPLED, VOCABULARY, exclusive=exclusive)
    other.prefill(tokens[:22])
    asked = Batch([], [4, 5], [-1, -1], 4)

    assert_alike(again.evaluate(asked), other.evaluate(asked))
    assert first.memory >= 2 * np.prod(converted.package.cache_shape)
    if not exclusive:
        assert (first.committed, again.committed) == (30, 22)
