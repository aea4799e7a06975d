"""A target reuses the KV of ended and live sequences; no token changes. Tiny model, real arenas."""

import random

import pytest
from msgspec.structs import replace

from protocol.inference import tree_sequence
from protocol.inference.language_model import LanguageModel
from protocol.messages.base import RequestId
from protocol.messages.kv import KvOffer, KvReference, KvRelease
from protocol.messages.worker import KvCut, Prefilled, Stop
from target_worker.engine import TargetEngine
from target_worker.worker import TargetWorker
from tests.support.models.architectures import tiny
from tests.support.models.tiny_models import VOCABULARY
from tests.support.target_requests import HELLO, Request, answers
from tests.target_worker.test_kv import PROMPT, exchange, model, start

pytestmark = pytest.mark.usefixtures("registry")


def target(prefix_cache: int = 1 << 30, *, arenas: bool = False) -> TargetWorker:
    return TargetWorker(
        TargetEngine(model(), 64, exchange() if arenas else None), float, HELLO, prefix_cache=prefix_cache
    )


def fresh(prompt: list[int], length: int) -> list[int]:
    """The tokens of plain decoding in a new worker."""
    return Request(target(0), start(prompt)).decode(length)


def end(talk: Request) -> None:
    answers(talk.worker, Stop(talk.sequence))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("arenas", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_random_turns_and_edits_change_no_token(seed: int, arenas: bool):
    chance = random.Random(seed)
    worker = target(chance.choice((1 << 16, 1 << 30)), arenas=arenas)
    prompt, evaluated, live = list(PROMPT), 0, []
    for turn in range(1, 9):
        talk = Request(worker, start(prompt, sequence=turn))
        length = chance.randrange(1, 30)
        assert talk.decode(length) == fresh(prompt, length)
        assert talk.prefilled.adopted + talk.prefilled.tokens == len(prompt) - 1
        evaluated += talk.prefilled.tokens
        live.append(talk)
        if chance.random() < 0.7:
            end(live.pop(chance.randrange(len(live))))
        cut = len(talk.tokens) if chance.random() < 0.6 else chance.randrange(1, len(talk.tokens))
        prompt = talk.tokens[:cut] + chance.choices(range(VOCABULARY), k=chance.randrange(1, 40))
    for talk in live:
        assert talk.decode(5) == fresh(list(talk.prompt), len(talk.tokens) - len(talk.prompt))


def test_a_conversation_evaluates_only_what_is_new():
    worker = target()
    prompt = list(PROMPT)
    for turn in range(1, 6):
        talk = Request(worker, start(prompt, sequence=turn))
        talk.decode(20)
        end(talk)
        assert talk.prefilled.tokens == (len(PROMPT) - 1 if turn == 1 else 3)
        prompt = [*talk.tokens, 1, 2, 3]


def test_the_next_turn_goes_on_writing_the_same_arena():
    worker = target(arenas=True)
    first = Request(worker, start(sequence=1))
    first.decode(70)
    end(first)
    second = Request(worker, start([*first.tokens, 1, 2, 3], sequence=2))
    second.decode(70)

    assert {offer.name for offer in (*first.offers, *second.offers)} == {first.offers[0].name}
    heir = Request(
        target(arenas=True), start(second.tokens, KvReference(second.offers[-1].name, second.offers[-1].tokens))
    )
    assert heir.prefilled.adopted == second.offers[-1].tokens
    assert heir.decode(9) == second.decode(9)


def test_an_edit_writes_another_arena_and_does_not_change_the_first():
    worker = target(arenas=True)
    first = Request(worker, start(sequence=1))
    end(first)
    edited = [*PROMPT[:80], *PROMPT[:80]]
    second = Request(worker, start(edited, sequence=2))

    assert second.prefilled.adopted == 80
    assert second.offers[0].name != first.offers[0].name
    heir = Request(target(arenas=True), start(adopt=KvReference(first.offers[0].name, 89)))
    assert heir.decode(9) == fresh(list(PROMPT), 9)


def test_a_released_arena_is_closed_and_the_next_turn_has_another():
    worker = target(arenas=True)
    first = Request(worker, start(sequence=1))
    end(first)
    answers(worker, KvRelease(first.offers[0].name))
    second = Request(worker, start([*PROMPT, 1, 2, 3], sequence=2))

    assert second.prefilled.adopted == 89
    assert second.offers[0].name != first.offers[0].name


def test_a_longer_arena_is_preferred_to_the_prefix_cache():
    writer = Request(target(arenas=True), start(sequence=1))
    reader = target(arenas=True)
    short = Request(reader, start(PROMPT[:50], sequence=1))
    end(short)
    adopted = Request(reader, start(adopt=KvReference(writer.offers[0].name, 89), sequence=2))

    assert (adopted.prefilled.adopted, adopted.prefilled.warning) == (89, "")


def test_the_partial_prefill_of_a_cancelled_prompt_is_reused():
    worker = target()
    list(worker.handle(start()))
    list(worker.work())
    answers(worker, Stop(RequestId(1)))
    talk = Request(worker, start(sequence=2))

    assert (talk.prefilled.adopted, talk.prefilled.tokens) == (64, 25)
    assert talk.decode(9) == fresh(list(PROMPT), 9)


def at_once(worker: TargetWorker, prompts: list[list[int]]) -> list[Prefilled]:
    """The replies if all prompts start before the first prefill."""
    replies = [reply for id, prompt in enumerate(prompts, 1) for reply in worker.handle(start(prompt, sequence=id))]
    while worker.has_work:
        replies += worker.work()
    return sorted((one for one in replies if isinstance(one, Prefilled)), key=lambda one: one.request)


def test_prompts_that_begin_alike_are_prefilled_once():
    long = random.Random(5).choices(range(VOCABULARY), k=400)
    prompts = [long, [*long[:200], 1, 2, 3], long, [*long[:300], *long[:100]], long[::-1]]
    worker = target()
    done = at_once(worker, prompts)

    assert [(one.adopted, one.tokens) for one in done] == [(0, 399), (200, 2), (399, 0), (300, 99), (0, 399)]
    for id, prompt in enumerate(prompts, 1):
        talk = Request(worker, start(prompt, sequence=id))
        assert talk.decode(5) == fresh(prompt, 5)


@pytest.mark.parametrize("units", [1, 3, 5])
def test_a_sequence_that_waited_for_an_ended_one_prefills_itself(units: int):
    long = random.Random(6).choices(range(VOCABULARY), k=400)
    worker = target()
    for id in (1, 2, 3):
        list(worker.handle(start(long, sequence=id)))
    for _ in range(units):
        list(worker.work())
    answers(worker, Stop(RequestId(1)))

    for id in (2, 3):
        assert Request(worker, start(long, sequence=id)).decode(5) == fresh(long, 5)


LONG = random.Random(7).choices(range(VOCABULARY), k=800)


def test_a_short_answer_leaves_as_much_in_shared_memory_as_a_long_one():
    worker = target(arenas=True)
    list(worker.handle(start(LONG)))
    while not any(isinstance(reply, Prefilled) for reply in list(worker.work())):
        pass
    offers = [reply for reply in answers(worker, Stop(RequestId(1))) if isinstance(reply, KvOffer)]

    assert offers[-1].tokens == 799


def test_of_a_conversation_that_does_not_fit_the_first_tokens_are_kept():
    whole = model().sequence()
    whole.prefill(LONG)
    worker = target(whole.memory // 2)
    Request(worker, start(LONG))
    (cut,) = answers(worker, Stop(RequestId(1)))
    again = Request(worker, start(LONG, sequence=2))

    assert isinstance(cut, KvCut)
    assert cut.tokens == 799
    assert cut.memory > whole.memory // 2
    assert 300 < again.prefilled.adopted == cut.kept < 600
    assert again.decode(5) == fresh(LONG, 5)


def test_shared_memory_is_written_before_the_rest_is_cut_from_a_worker_s_own():
    worker = target(1 << 16, arenas=True)
    list(worker.handle(start(LONG)))
    while not any(isinstance(reply, Prefilled) for reply in list(worker.work())):
        pass
    replies = answers(worker, Stop(RequestId(1)))
    last = [reply for reply in replies if isinstance(reply, KvOffer)][-1]

    assert last.tokens == 799
    assert not any(isinstance(reply, KvCut) for reply in replies)
    assert Request(worker, start(LONG, KvReference(last.name, 799), sequence=2)).prefilled.adopted == 799


def test_live_and_ended_kv_share_one_pool():
    whole = model().sequence()
    whole.prefill(LONG)
    pool = whole.memory * 3 // 2
    worker = TargetWorker(TargetEngine(model(), 64), float, HELLO, prefix_cache=pool, pool=pool)
    Request(worker, start(LONG))
    answers(worker, Stop(RequestId(1)))
    other = Request(worker, start(LONG[::-1], sequence=2))
    held = sum(kv.memory for kv in worker._prefix_sharing.cached) + worker._sequences[RequestId(2)].kv.memory

    assert other.decode(5) == fresh(LONG[::-1], 5)
    assert whole.memory < held <= pool


def test_a_recurrent_state_is_where_the_next_turn_branches_off():
    """A template drops the opening of an answer, or its thoughts, from the history: the prompt's last tokens change."""
    recurrent = LanguageModel(tiny("qwen3_next"))
    worker = TargetWorker(TargetEngine(recurrent, 64), float, HELLO, prefix_cache=1 << 30)
    first = Request(worker, start(LONG[:300]))
    first.decode(20)
    end(first)
    turn = [*LONG[:290], *LONG[400:440]]

    talk = Request(worker, start(turn, sequence=2))

    assert talk.prefilled.adopted == 299 - 16
    alone = TargetWorker(TargetEngine(recurrent, 64), float, HELLO)
    assert talk.decode(10) == Request(alone, start(turn)).decode(10)


def test_behind_a_turn_of_few_tokens_the_next_one_branches_off_where_it_began():
    recurrent = LanguageModel(tiny("qwen3_next"))
    worker = TargetWorker(TargetEngine(recurrent, 64), float, HELLO, prefix_cache=1 << 30)
    first = Request(worker, start(LONG[:300]))
    short = [*first.decode(20), *LONG[400:405]]
    end(first)
    second = Request(worker, start(short, sequence=2))
    second.decode(20)
    end(second)
    turn = [*short, *LONG[500:530]]

    talk = Request(worker, start(turn, sequence=3))

    assert (second.prefilled.adopted, talk.prefilled.adopted) == (319, 319)
    alone = TargetWorker(TargetEngine(recurrent, 64), float, HELLO)
    assert talk.decode(10) == Request(alone, start(turn)).decode(10)


@pytest.mark.parametrize("name", ["qwen3_next", "gemma3_text"])
def test_another_conversation_begins_where_the_instructions_end(name: str, monkeypatch: pytest.MonkeyPatch):
    """Where the server says that they end, or where another conversation branched off before: states and windows can't
    be cut anywhere."""
    monkeypatch.setattr(tree_sequence, "_SPARE_ROWS", 8)
    branching = LanguageModel(tiny(name))
    worker = TargetWorker(TargetEngine(branching, 64), float, HELLO, prefix_cache=1 << 30)
    alone = TargetWorker(TargetEngine(branching, 64), float, HELLO)
    adopted: list[int] = []
    for number, shared in enumerate((400, 150, 120, 120), 1):
        asked = replace(start([*LONG[:shared], *[number] * 60], sequence=number), shared_prefix=150)
        talk = Request(worker, asked)
        adopted.append(talk.prefilled.adopted)
        assert talk.decode(5) == Request(alone, replace(asked, request=RequestId(10 + number))).decode(5)
        end(talk)

    assert adopted == [0, 150, 0, 120]


def test_a_turn_that_comes_before_all_is_saved_continues_what_the_prefix_cache_would_cut():
    worker = target(1 << 16, arenas=True)
    list(worker.handle(start(LONG)))
    while not any(isinstance(reply, Prefilled) for reply in list(worker.work())):
        pass
    list(worker.handle(Stop(RequestId(1))))
    turn = [*LONG, 1, 2, 3]

    talk = Request(worker, start(turn, sequence=2))

    assert (talk.prefilled.adopted, talk.prefilled.tokens) == (799, 3)
    assert talk.offers[-1].tokens == 802
    assert talk.decode(5) == fresh(turn, 5)
