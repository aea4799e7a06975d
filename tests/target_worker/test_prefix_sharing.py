"""A target reuses the KV of ended and live sequences; no token changes. Tiny model, real arenas."""

import random
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from protocol.inference import tree_sequence
from protocol.inference.language_model import LanguageModel
from protocol.messages.base import RequestId
from protocol.messages.kv import KvOffer, KvReference, KvRelease
from protocol.messages.worker import KvCut, Prefilled, Stop
from target_worker.worker import TargetWorker
from tests.support.models.architectures import tiny
from tests.support.models.tiny_models import VOCABULARY
from tests.support.target_requests import LONG_PROMPT, Request, answers, target
from tests.target_worker.test_kv import begin, exchange, model

pytestmark = pytest.mark.usefixtures("registry")


def sharing(prefix_cache: int = 1 << 30, *, arenas: bool = False, of: LanguageModel | None = None) -> TargetWorker:
    return target(of or model(), exchange=exchange() if arenas else None, prefix_cache=prefix_cache)


def fresh(prompt: Sequence[int], length: int, of: LanguageModel | None = None) -> list[int]:
    """The tokens of plain decoding in a new worker."""
    return Request(target(of or model()), begin(prompt)).decode(length)


def end(talk: Request) -> None:
    answers(talk.worker, Stop(talk.sequence))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("arenas", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_random_turns_and_edits_change_no_token(seed: int, arenas: bool):
    chance = random.Random(seed)
    worker = sharing(chance.choice((1 << 16, 1 << 30)), arenas=arenas)
    prompt, evaluated, live = list(LONG_PROMPT), 0, []
    for turn in range(1, 9):
        talk = Request(worker, begin(prompt, request=turn))
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
        assert talk.decode(5) == fresh(talk.prompt, len(talk.tokens) - len(talk.prompt))


def test_a_conversation_evaluates_only_what_is_new():
    worker = sharing()
    prompt = list(LONG_PROMPT)
    for turn in range(1, 6):
        talk = Request(worker, begin(prompt, request=turn))
        talk.decode(20)
        end(talk)
        assert talk.prefilled.tokens == (len(LONG_PROMPT) - 1 if turn == 1 else 3)
        prompt = [*talk.tokens, 1, 2, 3]


def test_the_next_turn_goes_on_writing_the_same_arena():
    worker = sharing(arenas=True)
    first = Request(worker, begin(request=1))
    first.decode(70)
    end(first)
    second = Request(worker, begin([*first.tokens, 1, 2, 3], request=2))
    second.decode(70)

    assert {offer.name for offer in (*first.offers, *second.offers)} == {first.offers[0].name}
    heir = Request(
        sharing(arenas=True), begin(second.tokens, KvReference(second.offers[-1].name, second.offers[-1].tokens))
    )
    assert heir.prefilled.adopted == second.offers[-1].tokens
    assert heir.decode(9) == second.decode(9)


def test_an_edit_writes_another_arena_and_does_not_change_the_first():
    worker = sharing(arenas=True)
    first = Request(worker, begin(request=1))
    end(first)
    edited = [*LONG_PROMPT[:80], *LONG_PROMPT[:80]]
    second = Request(worker, begin(edited, request=2))

    assert second.prefilled.adopted == 80
    assert second.offers[0].name != first.offers[0].name
    heir = Request(sharing(arenas=True), begin(adopt=KvReference(first.offers[0].name, 89)))
    assert heir.decode(9) == fresh(LONG_PROMPT, 9)


def test_a_released_arena_is_closed_and_the_next_turn_has_another():
    worker = sharing(arenas=True)
    first = Request(worker, begin(request=1))
    end(first)
    answers(worker, KvRelease(first.offers[0].name))
    second = Request(worker, begin([*LONG_PROMPT, 1, 2, 3], request=2))

    assert second.prefilled.adopted == 89
    assert second.offers[0].name != first.offers[0].name


def test_a_longer_arena_is_preferred_to_the_prefix_cache():
    writer = Request(sharing(arenas=True), begin(request=1))
    reader = sharing(arenas=True)
    short = Request(reader, begin(LONG_PROMPT[:50], request=1))
    end(short)
    adopted = Request(reader, begin(adopt=KvReference(writer.offers[0].name, 89), request=2))

    assert (adopted.prefilled.adopted, adopted.prefilled.warning) == (89, "")


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "gemma3_text"])
def test_the_partial_prefill_of_a_cancelled_prompt_is_reused(name: str):
    of = LanguageModel(tiny(name))
    worker = sharing(of=of)
    list(worker.handle(begin()))
    list(worker.work())
    answers(worker, Stop(RequestId(1)))
    talk = Request(worker, begin(request=2))

    assert (talk.prefilled.adopted, talk.prefilled.tokens) == (64, 25)
    assert talk.decode(9) == fresh(LONG_PROMPT, 9, of)


def at_once(worker: TargetWorker, prompts: list[list[int]]) -> list[Prefilled]:
    """The replies if all prompts start before the first prefill."""
    replies = [reply for id, prompt in enumerate(prompts, 1) for reply in worker.handle(begin(prompt, request=id))]
    while worker.has_work:
        replies += worker.work()
    return sorted((one for one in replies if isinstance(one, Prefilled)), key=lambda one: one.request)


def test_prompts_that_begin_alike_are_prefilled_once():
    long = random.Random(5).choices(range(VOCABULARY), k=400)
    prompts = [long, [*long[:200], 1, 2, 3], long, [*long[:300], *long[:100]], long[::-1]]
    worker = sharing()
    done = at_once(worker, prompts)

    assert [(one.adopted, one.tokens) for one in done] == [(0, 399), (200, 2), (399, 0), (300, 99), (0, 399)]
    for id, prompt in enumerate(prompts, 1):
        talk = Request(worker, begin(prompt, request=id))
        assert talk.decode(5) == fresh(prompt, 5)


LONG = random.Random(7).choices(range(VOCABULARY), k=800)


def prefilled(worker: TargetWorker) -> None:
    """A long prompt is evaluated, and not saved yet."""
    list(worker.handle(begin(LONG)))
    while not any(isinstance(reply, Prefilled) for reply in list(worker.work())):
        pass


def test_a_short_answer_leaves_as_much_in_shared_memory_as_a_long_one():
    worker = sharing(arenas=True)
    prefilled(worker)
    offers = [reply for reply in answers(worker, Stop(RequestId(1))) if isinstance(reply, KvOffer)]

    assert offers[-1].tokens == 799


def test_of_a_conversation_that_does_not_fit_the_first_tokens_are_kept():
    whole = model().sequence()
    whole.prefill(LONG)
    worker = sharing(whole.memory // 2)
    Request(worker, begin(LONG))
    (cut,) = answers(worker, Stop(RequestId(1)))
    again = Request(worker, begin(LONG, request=2))

    assert isinstance(cut, KvCut)
    assert cut.tokens == 799
    assert cut.memory > whole.memory // 2
    assert 300 < again.prefilled.adopted == cut.kept < 600
    assert again.decode(5) == fresh(LONG, 5)


def test_shared_memory_is_written_before_the_rest_is_cut_from_a_worker_s_own():
    worker = sharing(1 << 16, arenas=True)
    prefilled(worker)
    replies = answers(worker, Stop(RequestId(1)))
    last = [reply for reply in replies if isinstance(reply, KvOffer)][-1]

    assert last.tokens == 799
    assert not any(isinstance(reply, KvCut) for reply in replies)
    assert Request(worker, begin(LONG, KvReference(last.name, 799), request=2)).prefilled.adopted == 799


def test_live_and_ended_kv_share_one_pool():
    whole = model().sequence()
    whole.prefill(LONG)
    pool = whole.memory * 3 // 2
    worker = target(model(), prefix_cache=pool, pool=pool)
    Request(worker, begin(LONG))
    answers(worker, Stop(RequestId(1)))
    other = Request(worker, begin(LONG[::-1], request=2))
    held = sum(kv.memory for kv in worker._prefix_sharing.cached) + worker._sequences[RequestId(2)].kv.memory

    assert other.decode(5) == fresh(LONG[::-1], 5)
    assert whole.memory < held <= pool


def test_a_recurrent_state_is_where_the_next_turn_branches_off():
    """A template drops the opening of an answer, or its thoughts, from the history: the prompt's last tokens change."""
    recurrent = LanguageModel(tiny("qwen3_next"))
    worker = sharing(of=recurrent)
    first = Request(worker, begin(LONG[:300]))
    first.decode(20)
    end(first)
    turn = [*LONG[:290], *LONG[400:440]]

    talk = Request(worker, begin(turn, request=2))

    assert talk.prefilled.adopted == 299 - 16
    assert talk.decode(10) == fresh(turn, 10, recurrent)


def test_behind_a_turn_of_few_tokens_the_next_one_branches_off_where_it_began():
    recurrent = LanguageModel(tiny("qwen3_next"))
    worker = sharing(of=recurrent)
    first = Request(worker, begin(LONG[:300]))
    short = [*first.decode(20), *LONG[400:405]]
    end(first)
    second = Request(worker, begin(short, request=2))
    second.decode(20)
    end(second)
    turn = [*short, *LONG[500:530]]

    talk = Request(worker, begin(turn, request=3))

    assert (second.prefilled.adopted, talk.prefilled.adopted) == (319, 319)
    assert talk.decode(10) == fresh(turn, 10, recurrent)


@pytest.mark.parametrize("name", ["qwen3_next", "gemma3_text"])
def test_another_conversation_begins_where_the_instructions_end(name: str, monkeypatch: pytest.MonkeyPatch):
    """Where the server says that they end, or where another conversation branched off before: states and windows can't
    be cut anywhere."""
    monkeypatch.setattr(tree_sequence, "_SPARE_ROWS", 8)
    branching = LanguageModel(tiny(name))
    worker = sharing(of=branching)
    adopted: list[int] = []
    for number, shared in enumerate((400, 150, 120, 120), 1):
        asked = replace(begin([*LONG[:shared], *[number] * 60], request=number), shared_prefix=150)
        talk = Request(worker, asked)
        adopted.append(talk.prefilled.adopted)
        assert talk.decode(5) == fresh(asked.tokens, 5, branching)
        end(talk)

    assert adopted == [0, 150, 0, 120]


def test_a_turn_that_comes_before_all_is_saved_continues_what_the_prefix_cache_would_cut():
    worker = sharing(1 << 16, arenas=True)
    prefilled(worker)
    list(worker.handle(Stop(RequestId(1))))
    turn = [*LONG, 1, 2, 3]

    talk = Request(worker, begin(turn, request=2))

    assert (talk.prefilled.adopted, talk.prefilled.tokens) == (799, 3)
    assert talk.offers[-1].tokens == 802
    assert talk.decode(5) == fresh(turn, 5)
