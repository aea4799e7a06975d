"""The KV of the prefill worker equal the target's own KV. Real arenas, tiny models."""

import os
import random
from collections.abc import Sequence
from functools import partial
from itertools import count
from typing import Any, NoReturn

import pytest

from draft_worker.prefill.worker import ArenaSink, PrefillWorker, layout_of
from protocol.errors import InputError
from protocol.inference.language_model import LanguageModel
from protocol.inference.tree_sequence import TreeSequence
from protocol.kv.exchange import KvExchange
from protocol.kv.segments import open_segment
from protocol.messages.base import RequestId
from protocol.messages.kv import KvOffer, KvReference
from protocol.messages.worker import Fault, Prefill, Stop, ToWorker
from protocol.worker.failed_calls import SurvivingWorker
from protocol.worker.interface import Worker, WorkerReply
from tests.support.models.tiny_models import VOCABULARY
from tests.support.segments import exists
from tests.support.target_requests import Request
from tests.target_worker.test_kv import begin, exchange, expected, model, sharing

pytestmark = pytest.mark.usefixtures("registry")
PROMPT = begin().tokens


def worker(sharing: KvExchange | None = None) -> PrefillWorker:
    ticks = count()
    open_sink = partial(ArenaSink, sharing or exchange())
    return PrefillWorker(model(), open_sink, lambda: float(next(ticks)), 32)


def asked(tokens: Sequence[int] = PROMPT[:-1], sequence: int = 1) -> Prefill:
    return Prefill(RequestId(sequence), tuple(tokens))


def answers(reader: Worker, message: ToWorker) -> list[WorkerReply]:
    replies = list(reader.handle(message))
    while reader.has_work:
        replies += reader.work()
    return replies


def refused(reader: Worker, message: ToWorker) -> str:
    (fault,) = answers(reader, message)
    assert isinstance(fault, Fault)
    assert (fault.kind, fault.request) == ("refused", 1)
    return fault.text


def offered(reader: Worker, message: ToWorker) -> KvOffer:
    (offer,) = answers(reader, message)
    assert isinstance(offer, KvOffer)
    return offer


def test_an_offer_states_its_tokens_size_and_seconds():
    offer = offered(worker(), asked())

    assert (offer.request, offer.tokens, offer.seconds) == (1, 89, 3.0)
    # macOS rounds shared memory up to pages of 16 KiB.
    assert len(open_segment(offer.name)) >= offer.size >= 89 * 2 * 2 * 2 * 8 * 4


def test_prompts_are_prefilled_one_after_the_other_in_chunks():
    reader = worker()
    list(reader.handle(asked(sequence=1)))
    list(reader.handle(asked(PROMPT[:20], sequence=2)))
    turns = []
    while reader.has_work:
        turns.append([reply.request for reply in reader.work() if isinstance(reply, KvOffer)])

    assert turns == [[], [], [1], [2]]


def test_a_repeated_prefill_is_ignored():
    reader = worker()
    list(reader.handle(asked()))
    list(reader.work())

    assert len(answers(reader, asked())) == 1


def test_a_changed_prefill_replaces_the_earlier_one():
    reader = worker()
    list(reader.handle(asked(random.Random(4).choices(range(VOCABULARY), k=70))))
    list(reader.work())
    offer = offered(reader, asked())

    talk = Request(sharing(), begin(adopt=KvReference(offer.name, offer.tokens)))

    assert talk.decode(20) == list(expected(20))


def test_a_stopped_prefill_leaves_no_arena_and_an_offered_one_outlives_a_stop(registry: Any):
    reader = worker()
    list(reader.handle(asked()))
    list(reader.work())
    (entry,) = registry.glob("*")
    list(reader.handle(Stop(RequestId(1))))

    assert not reader.has_work
    assert not exists(entry.name)
    offer = offered(reader, asked())
    list(reader.handle(Stop(RequestId(1))))
    assert exists(offer.name)


@pytest.mark.parametrize("tokens", [[1] * 4097, [1, VOCABULARY]], ids=["too long", "unknown token"])
def test_a_prompt_beyond_the_engine_s_limits_is_refused(tokens: list[int]):
    assert refused(worker(), asked(tokens))


def test_without_memory_a_prompt_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("protocol.kv.segments.free_shared_memory", lambda: 1 << 10)

    assert "shared memory" in refused(worker(), asked())


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("[malloc] Unable to allocate 9 bytes."), "memory does not suffice"),
        (MemoryError(), "memory does not suffice"),
        (RuntimeError("[METAL] Command buffer execution failed: Caused GPU Timeout Error."), "gave up a command"),
    ],
)
def test_a_prompt_whose_forward_fails_is_given_up_and_the_next_one_is_prefilled(
    registry: Any, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
):
    reader, prefill = SurvivingWorker(worker()), TreeSequence.prefill

    def failing(self: TreeSequence, tokens: Sequence[int]) -> None:
        prefill(self, tokens)
        if self.committed > 40:
            raise error

    monkeypatch.setattr(TreeSequence, "prefill", failing)

    assert words in refused(reader, asked())
    assert not any(exists(entry.name) for entry in registry.glob("*"))
    assert offered(reader, asked(PROMPT[:20], sequence=2)).tokens == 20


def test_a_sequence_that_can_not_be_opened_leaves_no_arena(registry: Any, monkeypatch: pytest.MonkeyPatch):
    def failing(_: LanguageModel) -> NoReturn:
        raise MemoryError

    monkeypatch.setattr(LanguageModel, "sequence", failing)

    assert refused(SurvivingWorker(worker()), asked())
    assert not any(exists(entry.name) for entry in registry.glob("*"))


def test_the_hello_of_a_prefill_worker_states_its_model():
    hello = worker().hello()

    assert (hello.role, hello.engine, hello.vocabulary, hello.pid) == ("prefill", "mlx", VOCABULARY, os.getpid())


def test_a_model_without_a_layout_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(model(), "layout", None)

    with pytest.raises(InputError, match="--prefill-engine none"):
        layout_of(model())
