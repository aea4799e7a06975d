"""A draft reuses the KV of common prefixes, and its growth does not change."""

import random
from collections.abc import Iterable, Sequence

import pytest

from draft_worker.engine_interface import Batch, Engine
from draft_worker.engines.mlx import MlxEngine
from draft_worker.engines.random import RandomEngine
from draft_worker.worker import DraftWorker
from protocol.messages.base import NodeId, RequestId
from protocol.messages.plans import BestFirst
from protocol.messages.sampling import Sampling
from protocol.messages.worker import Grow, Prefilled, Reroot, Start, Stop
from protocol.worker.interface import WorkerReply
from tests.support.draft_conversation import ROOT, below, grows
from tests.support.fake_draft import VOCABULARY, FakeEngine
from tests.support.models.tiny_models import VOCABULARY as TINY_VOCABULARY
from tests.support.models.tiny_models import tree_model
from tests.support.processing import processors

PLAN = BestFirst(width=2, fan=3)
PROMPT = tuple(random.Random(3).choices(range(VOCABULARY), k=90))


def drafting(prefix_cache: int, engine: Engine | None = None) -> DraftWorker:
    return DraftWorker(engine or FakeEngine(), lambda: 0.0, prefill_chunk=32, prefix_cache=prefix_cache)


def start(tokens: Iterable[int], sequence: int = 1) -> Start:
    return Start(RequestId(sequence), 0, tuple(tokens), ROOT, Sampling(seed=sequence), PLAN)


def said(worker: DraftWorker, *messages: Start | Reroot | Stop, units: int = 12) -> list[WorkerReply]:
    """All replies to the messages, and to some units of work after each."""
    replies: list[WorkerReply] = []
    for message in messages:
        replies += worker.handle(message)
        for _ in range(units):
            replies += worker.work()
    return replies


def growth(replies: Sequence[WorkerReply]) -> dict[tuple[int, NodeId], list[tuple]]:
    """The published children of each node of each sequence, in any order of messages."""
    found: dict[tuple[int, NodeId], list[tuple]] = {}
    for grow in grows(replies):
        for parent, token, probability in zip(grow.parents, grow.tokens, grow.probabilities, strict=True):
            found.setdefault((grow.request, parent), []).append((token, probability))
    return found


def prefilled(engine: FakeEngine) -> int:
    """Tokens in forwards of prompts."""
    return -sum(forward for sequence in engine.opened for forward in sequence.forwards if forward < 0)


@pytest.mark.parametrize("seed", range(6))
def test_random_turns_and_edits_change_no_growth(seed: int):
    chance = random.Random(seed)
    reusing, anew = drafting(chance.choice((150, 10_000))), drafting(0)
    prompt, live = list(PROMPT), []
    for turn in range(1, 12):
        messages: list[Start | Reroot | Stop] = [start(prompt, turn)]
        tokens = tuple(chance.choices(range(VOCABULARY), k=chance.randrange(1, 40)))
        messages.append(Reroot(RequestId(turn), 1, len(prompt) - 1, tokens, below(ROOT, tokens), missed=True))
        live.append(turn)
        if chance.random() < 0.7:
            messages.append(Stop(RequestId(live.pop(chance.randrange(len(live))))))
        one, other = growth(said(reusing, *messages)), growth(said(anew, *messages))
        shared = one.keys() & other.keys()
        assert shared
        assert all(one[key] == other[key] for key in shared)
        prompt += tokens
        if chance.random() < 0.4:
            prompt = prompt[: chance.randrange(1, len(prompt))]
        prompt += chance.choices(range(VOCABULARY), k=chance.randrange(1, 30))


def test_a_conversation_is_prefilled_once():
    engine = FakeEngine()
    worker = drafting(10_000, engine)
    prompt = list(PROMPT)
    for turn in range(1, 6):
        said(worker, start(prompt, turn), Stop(RequestId(turn)))
        prompt += random.Random(turn).choices(range(VOCABULARY), k=40)

    assert len(engine.opened) == 1
    assert prefilled(engine) <= len(prompt) - 40 - 1


def test_reused_tokens_are_reported_before_the_first_growth():
    worker = drafting(10_000)
    said(worker, start(PROMPT), Stop(RequestId(1)))
    first, second, *_ = said(worker, start([*PROMPT, *PROMPT[:40]], 2))

    assert first == Prefilled(RequestId(2), 0, 40, 0.0, 89)
    assert isinstance(second, Grow)


@pytest.mark.parametrize("kind", [MlxEngine, RandomEngine])
@pytest.mark.parametrize("exclusive", [True, False])
def test_engines_continue_from_the_first_tokens_of_another_sequence(kind: type[MlxEngine], exclusive: bool):
    engine = kind(tree_model("llama", seed=5), "tiny")
    hot = Sampling(temperature=0.7, seed=9, repetition_penalty=1.3)
    first = engine.open(Sampling(), TINY_VOCABULARY)
    first.prefill(list(range(50)))
    first.evaluate(Batch([], [1, 2], [-1, -1], 4))
    again = first.reopen(40, hot, TINY_VOCABULARY - 3, exclusive=exclusive)
    anew = engine.open(hot, TINY_VOCABULARY - 3)
    anew.prefill(list(range(40)))
    asked = Batch([], [7, 8], [-1, -1], 4, processors=processors(hot, range(40)), paths=[[7], [8]])
    found, expected = again.evaluate(asked), anew.evaluate(asked)

    assert (again.committed, first.memory > 0) == (40, True)
    assert [each.probabilities for each in found] == [pytest.approx(each.probabilities, abs=1e-4) for each in expected]
    if kind is MlxEngine:
        assert [each.tokens for each in found] == [each.tokens for each in expected]
    if not exclusive:
        assert first.committed == 50
        first.evaluate(Batch([], [3], [-1], 4))


def test_the_common_prefix_of_simultaneous_prompts_is_prefilled_once():
    long = random.Random(5).choices(range(VOCABULARY), k=400)
    prompts = [long, [*long[:200], *range(40)], long, long[::-1]]
    engine, anew = FakeEngine(), drafting(0)
    worker = drafting(10_000, engine)
    starts = [start(prompt, id) for id, prompt in enumerate(prompts, 1)]
    for message in starts:
        list(worker.handle(message))
    replies = [reply for _ in range(60) for reply in worker.work()]
    expected = growth(said(anew, *starts, units=40))
    found = growth(replies)

    assert {id for id, _ in found} == {1, 2, 3, 4}
    assert all(expected[key] == found[key] for key in found.keys() & expected.keys())
    assert prefilled(engine) <= 399 + 39 + 399
    adopted = {int(reply.request): reply.adopted for reply in replies if isinstance(reply, Prefilled)}
    assert adopted.keys() == {2, 3}
    assert adopted[2] >= 200
    # The last tokens of a prompt, up to 16, are evaluated with its root, and not prefilled.
    assert adopted[3] >= 399 - 16
