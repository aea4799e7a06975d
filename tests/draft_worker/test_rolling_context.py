"""Laws of a draft whose context is shorter than the conversation: it keeps drafting, on tokens that fit."""

import random
from pathlib import Path
from typing import Any

import pytest

from draft_worker.engine_interface import Batch, Engine
from draft_worker.engines.coreml import CoreMlEngine
from draft_worker.engines.mlx import MlxEngine
from draft_worker.worker import DraftWorker
from protocol.inference.language_model import LanguageModel
from protocol.messages.plans import BestFirst
from protocol.messages.sampling import Sampling
from protocol.speculation.rolling_context import RollingContext
from tests.support.draft_conversation import Conversation
from tests.support.fake_draft import VOCABULARY, FakeEngine, oracle
from tests.support.models.architectures import tiny
from tests.support.models.tiny_models import VOCABULARY as TINY_VOCABULARY
from tests.support.models.tiny_models import stock_logits

CONTEXTS = (4, 8, 32, 96, 2048)


class Talk(Conversation):
    """One request, which goes on token by token."""

    def __init__(self, engine: Engine, prompt: list[int], cache: int = 0) -> None:
        worker = DraftWorker(engine, lambda: 0.0, prefill_chunk=16, prefix_cache=cache)
        super().__init__(worker, prompt, BestFirst(width=1, fan=2))
        self.told = self.start()

    def guesses(self) -> list[int]:
        """Work until the root has children; the most probable first."""
        for _ in range(100):
            if self.tree.root.children:
                break
            self.told += self.work()
        return [*self.tree.root.children]


def some(count: int, seed: int = 0, vocabulary: int = VOCABULARY) -> list[int]:
    return random.Random(seed).choices(range(vocabulary), k=count)


@pytest.mark.parametrize("context", CONTEXTS)
def test_the_first_tokens_and_the_last_are_seen_in_order_and_leave_room_for_a_tree(context: int):
    rolling, sinks = RollingContext(context), min(4, context // 8)
    for length in range(0, 4 * context, max(1, context // 100)):
        seen, skipped = rolling.seen(range(length)), rolling.skipped(length)

        assert len(seen) == length - skipped <= context - 2
        assert rolling.horizon(length) - skipped == context - 1
        assert not skipped or len(seen) >= context // 2 - 1
        assert seen[:sinks] == [*range(min(sinks, length))][:sinks]
        assert seen[sinks:] == [*range(length - len(seen[sinks:]), length)]


@pytest.mark.parametrize("context", [32, 96, 2048])
def test_tokens_are_dropped_many_at_once(context: int):
    rolling = RollingContext(context)
    changes = sum(rolling.skipped(length) != rolling.skipped(length + 1) for length in range(8 * context))

    assert changes <= 8 * context // (context * 3 // 8)


@pytest.mark.parametrize("context", [16, 33, 96])
def test_growth_never_stops_and_follows_what_is_seen(context: int):
    engine = FakeEngine(context)
    rolling, conversation = RollingContext(context), Talk(engine, some(5))
    for token in some(4 * context, seed=1):
        seen = [*rolling.seen(conversation.tokens[:-1]), conversation.tokens[-1]]

        assert conversation.guesses() == oracle(seen, 2).tokens
        assert max(map(len, engine.opened[-1].evaluated)) < context
        conversation.commit(token, missed=True)


def test_a_prompt_far_beyond_the_context_is_read_from_its_end_alone():
    engine, prompt = FakeEngine(96), some(2000)
    conversation = Talk(engine, prompt)

    assert conversation.guesses() == oracle([*RollingContext(96).seen(prompt[:-1]), prompt[-1]], 2).tokens
    assert -sum(forward for forward in engine.opened[0].forwards if forward < 0) < 96


def test_dropping_tokens_prefills_at_most_one_and_a_half_for_each_token_that_is_added():
    engine = FakeEngine(512)
    conversation = Talk(engine, some(440))
    for token in some(1000, seed=2):
        conversation.guesses()
        conversation.commit(token, missed=True)

    prefilled = -sum(forward for forward in engine.opened[0].forwards if forward < 0)
    assert prefilled < 440 + 1.5 * 1000


def test_the_next_turn_keeps_the_kv_of_what_it_goes_on_seeing():
    engine, prompt = FakeEngine(96), some(130)
    first = Talk(engine, prompt, cache=10_000)
    first.guesses()
    first.reroot(*some(3, seed=5), missed=True)
    first.start()

    assert first.guesses() == oracle([*RollingContext(96).seen(first.tokens[:-1]), first.tokens[-1]], 2).tokens
    assert len(engine.opened) == 1
    assert engine.opened[0].forwards[-1] <= 8


# Real engines --------------------------------------------------------------------------------------


def assert_goes_on(engine: Engine, network: Any) -> None:
    """With a context of 32 tokens."""
    conversation = Talk(engine, some(10))
    for token in some(50, seed=3):
        seen = [*RollingContext(32).seen(conversation.tokens[:-1]), conversation.tokens[-1]]

        assert conversation.guesses()[0] == stock_logits(network, seen).argmax().item()
        conversation.commit(token, missed=True)


def test_a_converted_draft_goes_on_with_the_tokens_that_its_package_can_hold(tmp_path: Path):
    runs = pytest.importorskip("tests.support.models.coreml_runs", reason="coremltools is not installed")
    from draft_worker.coreml.runtime.runtimes import ExecutorRuntime

    converted = runs.convert(runs.tiny("qwen2"), tmp_path / "model", context=32, widths=(1, 16))
    assert_goes_on(CoreMlEngine(converted, ExecutorRuntime(converted.file, "fp32")), runs.tiny("qwen2"))


def engines(folder: Path) -> list[Engine]:
    runs = pytest.importorskip("tests.support.models.coreml_runs", reason="coremltools is not installed")
    from draft_worker.coreml.runtime.runtimes import ExecutorRuntime

    converted = runs.convert(runs.tiny("qwen2"), folder / "model")
    return [
        MlxEngine(LanguageModel(runs.tiny("qwen2")), ""),
        CoreMlEngine(converted, ExecutorRuntime(converted.file, "fp32")),
    ]


def test_the_noise_is_that_of_the_conversation_s_positions(tmp_path: Path):
    """A guess at a temperature is right only with the noise that the target draws."""
    prompt = some(12, vocabulary=TINY_VOCABULARY)
    for engine in engines(tmp_path):
        for sampling in (Sampling(), Sampling(temperature=3.0, seed=5)):
            found = []
            for skipped in range(6):
                sequence = engine.open(sampling, TINY_VOCABULARY)
                sequence.prefill(prompt)
                found.append(sequence.evaluate(Batch((), [7], [-1], 2, skipped=skipped))[0].tokens[0])

            assert (len(set(found)) == 1) == sampling.greedy


@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_an_mlx_draft_goes_on_beyond_its_context_whatever_its_caches(name: str):
    """A recurrent state can't be cut back to the first tokens: the draft then reads them again."""
    network = tiny(name, max_position_embeddings=32)

    assert_goes_on(MlxEngine(LanguageModel(network), ""), network)
