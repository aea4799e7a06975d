"""A restarted target adopts the KV that an earlier one saved; it prefills again if the KV are damaged. Real arenas."""

import os
import random
from collections.abc import Sequence
from functools import cache
from threading import Event
from typing import Any

import pytest
from msgspec.structs import replace

from protocol.inference import tree_sequence
from protocol.inference.language_model import LanguageModel
from protocol.kv import exchange as exchange_module
from protocol.kv import segments
from protocol.kv.arena import Arena
from protocol.kv.exchange import KvExchange
from protocol.messages.base import RequestId
from protocol.messages.kv import KvOffer, KvReference, KvRelease
from protocol.messages.worker import Prefilled, Start, Stop, Verdict
from target_worker.worker import TargetWorker
from tests.support.models.architectures import tiny
from tests.support.models.tiny_models import VOCABULARY, tree_model
from tests.support.target_requests import HOT, LONG_PROMPT, Request, answers, start, target

pytestmark = pytest.mark.usefixtures("registry")


@cache
def model() -> LanguageModel:
    return tree_model(max_position_embeddings=4096)


def exchange(fingerprint: str = "m", epoch: int = 7, **layout: Any) -> KvExchange:
    known = model().layout
    assert known is not None
    return KvExchange(replace(known, **layout), fingerprint=fingerprint, epoch=epoch, owner=os.getpid())


def sharing(exchange_: KvExchange | None = None) -> TargetWorker:
    return target(model(), exchange=exchange_ or exchange())


def begin(tokens: Sequence[int] = LONG_PROMPT, adopt: KvReference | None = None, **others: Any) -> Start:
    return start(tokens, HOT, adopt=adopt, **others)


def reference(offer: KvOffer, tokens: int | None = None) -> KvReference:
    return KvReference(offer.name, tokens or offer.tokens)


@cache
def expected(length: int) -> tuple[int, ...]:
    return tuple(Request(target(model()), begin()).decode(length))


def test_the_prompt_is_saved_when_it_was_read_and_then_every_64_tokens():
    talk = Request(sharing(), begin())
    talk.decode(140)

    assert [offer.tokens for offer in talk.offers] == [89, 89 + 64, 89 + 128]
    assert len({offer.name for offer in talk.offers}) == 1
    assert talk.tokens == list(expected(140))


def test_a_save_comes_after_the_verdict():
    talk = Request(sharing(), begin())
    talk.decode(63)

    replies = talk.ask(talk.verify())

    assert [type(reply) for reply in replies] == [Verdict, KvOffer]


def test_a_verdict_tells_how_long_was_saved_since_the_one_before():
    talk = Request(sharing(), begin())

    saving = [talk.step().saving for _ in range(66)]

    # Once after the prompt, and once after 64 tokens more.
    assert [round for round, seconds in enumerate(saving) if seconds > 0] == [0, 64]


def test_a_few_tokens_are_not_saved():
    assert Request(sharing(), begin(LONG_PROMPT[:32])).offers == []


def test_a_restarted_target_adopts_the_saved_kv_and_gives_the_same_tokens():
    first = Request(sharing(), begin())
    tokens = first.decode(70)

    second = Request(sharing(), begin(tokens, reference(first.offers[-1]), round=70))

    assert second.prefilled == Prefilled(RequestId(1), 70, 159 - 153, second.prefilled.seconds, adopted=153)
    assert second.prefilled.seconds > 0
    assert second.decode(70) == list(expected(140))


def test_adopted_kv_is_saved_again_only_with_enough_new_tokens():
    first = Request(sharing(), begin())
    other = Request(sharing(), begin([*LONG_PROMPT, 1, 2], reference(first.offers[0]), request=2))
    other.decode(61)
    assert other.offers == []

    other.decode(1)

    assert [offer.tokens for offer in other.offers] == [128, 89 + 64]
    offer = other.offers[-1]
    assert offer.name != first.offers[0].name
    assert Request(sharing(), begin(other.tokens, reference(offer))).decode(9) == other.decode(9)


@pytest.mark.thorough
def test_a_full_arena_is_followed_by_a_bigger_one():
    prompt = random.Random(2).choices(range(VOCABULARY), k=1500)
    talk = Request(sharing(), begin(prompt))
    assert [offer.tokens for offer in talk.offers] == [*range(128, 1499, 128), 1499]
    talk.decode(780)

    names = [offer.name for offer in talk.offers]
    tokens = [offer.tokens for offer in talk.offers]
    assert len(set(names)) == 2
    assert tokens == sorted(tokens)
    assert talk.offers[-1].size > talk.offers[0].size
    again = Request(sharing(), begin(talk.tokens, reference(talk.offers[-1])))
    assert again.prefilled.adopted == tokens[-1] > 2248
    assert again.decode(5) == talk.decode(5)


def test_a_released_arena_is_not_written_any_more():
    talk = Request(sharing(), begin())
    answers(talk.worker, KvRelease(talk.offers[0].name))
    talk.decode(70)

    assert len(talk.offers) == 1
    assert talk.tokens == list(expected(70))


def test_a_restarted_sequence_keeps_its_kv_and_its_arena():
    talk = Request(sharing(), begin())
    talk.decode(70)
    again = Request(talk.worker, begin(talk.tokens, reference(talk.offers[-1]), round=70))
    again.decode(70)

    assert (again.prefilled.adopted, again.prefilled.tokens) == (0, 0)
    assert {offer.name for offer in again.offers} == {talk.offers[0].name}
    assert again.tokens == list(expected(140))


def test_a_sequence_restarted_during_a_save_continues():
    prompt = random.Random(2).choices(range(VOCABULARY), k=400)
    worker = sharing()
    replies = list(worker.handle(begin(prompt)))
    while not any(isinstance(reply, KvOffer) for reply in replies):
        replies += worker.work()
    shorter = Request(worker, begin(prompt[:129], round=3))
    shorter.decode(70)

    assert [offer.tokens for offer in shorter.offers] == [128 + 64]
    fresh = Request(sharing(), begin(prompt[:129]))
    assert fresh.decode(70) == shorter.tokens


def corrupted(name: str) -> None:
    Arena.attach(name).keys[1, 0, 3, 2] += 1


def unlinked(name: str) -> None:
    segments.unlink_segment(name)


def overwritten(name: str) -> None:
    segments.open_segment(name)[:64] = bytes(64)


@pytest.mark.parametrize(
    ("mishap", "referenced", "words"),
    [
        (corrupted, 89, "torn"),
        (unlinked, 89, "lp-"),
        (overwritten, 89, "no KV arena"),
        *((lambda _: None, tokens, "beyond the root") for tokens in (90, 400)),
    ],
)
def test_an_arena_that_is_damaged_or_too_long_costs_a_prefill_and_a_warning(mishap: Any, referenced: int, words: str):
    (offer,) = Request(sharing(), begin()).offers
    mishap(offer.name)

    talk = Request(sharing(), begin(adopt=reference(offer, referenced)))

    assert (talk.prefilled.adopted, talk.prefilled.tokens) == (0, 89)
    assert words in talk.prefilled.warning
    assert talk.decode(40) == list(expected(40))


def test_a_target_without_shared_memory_still_serves():
    talk = Request(target(model()), begin(adopt=KvReference("lp-" + "0" * 20, 80)))

    assert "shares no KV" in talk.prefilled.warning
    assert talk.offers == []
    assert talk.decode(40) == list(expected(40))


def test_no_memory_left_means_no_arena_and_no_failure(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("protocol.kv.segments.free_shared_memory", lambda: 1 << 10)

    talk = Request(sharing(), begin())
    talk.decode(40)

    assert talk.offers == []
    assert talk.tokens == list(expected(40))


@cache
def windowed() -> LanguageModel:
    return LanguageModel(tiny("gemma3_text"))


def windowed_target(exchange: KvExchange | None) -> TargetWorker:
    return target(windowed(), exchange=exchange)


@pytest.fixture
def few_spare_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Almost no rows stay behind windows, which have 16 tokens. The tokens of plain decoding that keeps all rows."""
    tokens = Request(windowed_target(None), begin()).decode(150)
    monkeypatch.setattr(tree_sequence, "_SPARE_ROWS", 2)
    return tokens


def windowed_exchange(limit: int | None = None) -> KvExchange:
    layout = windowed().layout
    assert layout is not None
    return KvExchange(layout, fingerprint="w", epoch=7, owner=os.getpid(), limit=limit)


@pytest.mark.thorough
def test_rows_behind_a_window_stay_until_they_are_saved(few_spare_rows: list[int], monkeypatch: pytest.MonkeyPatch):
    """A larger arena takes what is gone from the full one; a new worker goes on from the last arena."""
    monkeypatch.setattr(exchange_module, "_MIN_ROOM", 8)
    worker = windowed_target(windowed_exchange())
    talk = Request(worker, begin())
    talk.decode(140)
    sequence = worker._sequences[RequestId(1)]

    assert sequence.checkpoint is not None
    assert 0 < sequence.cache.forgotten <= sequence.checkpoint.saved
    assert talk.tokens == few_spare_rows[: len(talk.tokens)]
    assert len({offer.name for offer in talk.offers}) > 1
    last = talk.offers[-1]
    again = Request(windowed_target(windowed_exchange()), begin(talk.tokens, reference(last), round=talk.round))
    assert again.prefilled.adopted == last.tokens
    assert again.decode(10) == few_spare_rows


@pytest.mark.thorough
def test_kv_too_large_for_an_arena_is_not_saved_and_forgets_at_once(few_spare_rows: list[int]):
    worker = windowed_target(windowed_exchange(limit=1 << 14))
    talk = Request(worker, begin())
    talk.decode(60)
    cache = worker._sequences[RequestId(1)].cache

    assert not talk.offers
    assert cache.committed - cache.forgotten <= 16 + 2 * 2
    assert talk.tokens == few_spare_rows[: len(talk.tokens)]


@pytest.fixture
def touching(monkeypatch: pytest.MonkeyPatch) -> Event:
    """While it is not set, the system finds no memory for arenas."""
    found, touch = Event(), Arena.touch
    monkeypatch.setattr(Arena, "touch", lambda *given: (found.wait(60), touch(*given)))
    return found


def prepared() -> TargetWorker:
    ahead = exchange()
    ahead.touches_ahead = True
    return sharing(ahead)


def finished(talk: Request, found: Event) -> None:
    """Wait until all memory that was asked for is there."""
    checkpoint = talk.worker._sequences[talk.sequence].checkpoint
    assert checkpoint is not None
    assert checkpoint._touching is not None
    found.set()
    checkpoint._touching.join(60)


def test_rounds_do_not_wait_for_the_memory_of_an_arena(touching: Event):
    talk = Request(prepared(), begin())
    talk.decode(20)
    assert talk.offers == []
    finished(talk, touching)

    talk.decode(120)

    assert [offer.tokens for offer in talk.offers] == [89 + 21, 89 + 21 + 64]
    assert talk.tokens == list(expected(140))
    again = Request(sharing(), begin(talk.tokens, reference(talk.offers[-1])))
    assert again.prefilled.adopted == 89 + 21 + 64


def test_kv_is_saved_64_tokens_later_at_the_latest(touching: Event):
    talk = Request(prepared(), begin())
    talk.decode(63)
    assert talk.offers == []

    talk.decode(1)

    assert [offer.tokens for offer in talk.offers] == [128, 89 + 64]
    finished(talk, touching)


def test_a_request_that_ends_is_saved_at_once(touching: Event):
    talk = Request(prepared(), begin())
    talk.decode(5)

    replies = answers(talk.worker, Stop(talk.sequence))

    assert [each.tokens for each in replies if isinstance(each, KvOffer)] == [89 + 5]
    touching.set()
