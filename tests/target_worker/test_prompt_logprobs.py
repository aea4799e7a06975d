"""Laws of log-probabilities: they are stock mlx-lm's, best first, for prompts too, and change nothing else."""

import random
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from msgspec.structs import replace

from protocol.messages.base import MAX_NODES, Level, RequestId
from protocol.messages.sampling import Sampling, TokenLogprob
from protocol.messages.worker import FromWorker, Prefilled, PromptLogprobs, Start, Stop, ToWorker
from target_worker.verification import token_logprobs
from target_worker.worker import TargetWorker
from tests.support.logit_rows import rows, sorted_widths
from tests.support.models.tiny_models import VOCABULARY, network, tree_model
from tests.support.target_requests import HOT, LONG_PROMPT, Request, answers, start, target

TOLD = Sampling(prompt_logprobs=True, logprobs=2)


def telling(chunk: int = 64, level: Level = "tree") -> TargetWorker:
    model = tree_model()
    model.level = level
    return target(model, chunk, prefix_cache=1 << 30)


def asked(tokens: Sequence[int] = LONG_PROMPT, prompt: int | None = None, request: int = 1) -> Start:
    return start(tokens, TOLD, request, prompt_tokens=len(tokens) if prompt is None else prompt)


def told(replies: Sequence[FromWorker], request: int = 1) -> list[TokenLogprob]:
    """Of the messages about one sequence, which follow each other and precede the Prefilled."""
    found: list[TokenLogprob] = []
    mine = [reply for reply in replies if isinstance(reply, PromptLogprobs | Prefilled) and reply.request == request]
    assert isinstance(mine[-1], Prefilled)
    for reply in mine[:-1]:
        assert isinstance(reply, PromptLogprobs)
        assert reply.first == len(found)
        found += reply.token_logprobs
    return found


def expected(tokens: Sequence[int]) -> list[float]:
    model = network()
    logits = np.array(model(mx.array([list(tokens)]), cache=make_prompt_cache(model))[0].astype(mx.float32), float)
    logs = logits - np.logaddexp.reduce(logits, axis=-1)[:, None]
    return [logs[place, token] for place, token in enumerate(tokens[1:])]


def chosen(token_logprobs: Sequence[TokenLogprob]) -> list[float]:
    return [token_logprob.chosen for token_logprob in token_logprobs]


@pytest.mark.parametrize("level", ["tree", "chain", "plain"])
@pytest.mark.parametrize("chunk", [1, 7, 64, 512])
def test_every_token_of_the_prompt_but_the_first_is_told(chunk: int, level: Level):
    found = told(answers(telling(chunk, level), asked()))

    assert chosen(found) == pytest.approx(expected(LONG_PROMPT), abs=1e-3)
    assert {len(token_logprob.best) for token_logprob in found} == {2}


def test_generated_tokens_of_a_sequence_that_goes_on_are_not_told():
    found = told(answers(telling(7), asked(prompt=20)))

    assert chosen(found) == pytest.approx(expected(LONG_PROMPT[:20]), abs=1e-3)


def test_a_prompt_of_one_token_has_nothing_to_tell():
    assert told(answers(telling(), asked([4]))) == []


def test_the_whole_prompt_is_told_whatever_kv_there_is():
    worker = telling()
    answers(worker, start(LONG_PROMPT, HOT, request=1))
    answers(worker, Stop(RequestId(1)))
    answers(worker, start(LONG_PROMPT, HOT, request=2))

    found = told(answers(worker, asked(request=3)), request=3)
    answers(worker, Stop(RequestId(2)))

    assert chosen(found) == pytest.approx(expected(LONG_PROMPT), abs=1e-3)
    (again,) = answers(worker, start(LONG_PROMPT, HOT, request=4))
    assert isinstance(again, Prefilled)
    assert again.adopted == len(LONG_PROMPT) - 1


def test_a_repeated_start_is_told_again():
    worker = telling(7)
    first = told(answers(worker, asked()))

    assert told(answers(worker, asked())) == first
    assert chosen(told(answers(worker, asked(LONG_PROMPT[:20])))) == pytest.approx(expected(LONG_PROMPT[:20]), abs=1e-3)


def test_sequences_that_wait_for_the_same_prompt_are_each_told_it():
    worker = telling(16)
    replies: list[Any] = []
    messages: list[ToWorker] = [start(LONG_PROMPT, HOT, request=1), asked(request=2), asked(request=3)]
    for message in messages:
        replies += worker.handle(message)
    while worker.has_work:
        replies += worker.work()

    assert chosen(told(replies, 2)) == chosen(told(replies, 3)) == pytest.approx(expected(LONG_PROMPT), abs=1e-3)


def test_the_tokens_that_follow_are_the_same():
    silent = start(LONG_PROMPT, HOT)
    told = replace(silent, prompt_tokens=len(LONG_PROMPT), sampling=replace(HOT, prompt_logprobs=True))

    assert Request(telling(7), told).decode(9) == Request(telling(7), silent).decode(9)


def test_no_message_tells_of_more_tokens_than_it_may():
    prompt = random.Random(2).choices(range(VOCABULARY), k=MAX_NODES + 50)
    model = tree_model(max_position_embeddings=2048)

    replies = answers(target(model, 2048), asked(prompt))

    sizes = [len(reply.token_logprobs) for reply in replies if isinstance(reply, PromptLogprobs)]
    assert sizes == [MAX_NODES, 49]
    assert len(told(replies)) == len(prompt) - 1


@pytest.mark.parametrize("kind", ["normal", "tied", "half"])
@pytest.mark.parametrize("width", [100, 5000])
def test_the_best_are_the_head_of_a_stable_sort(kind: str, width: int):
    logits = rows(kind, 3, width, seed=2)
    logs = logits.astype(np.float64) - np.logaddexp.reduce(logits.astype(np.float64), axis=-1)[:, None]

    found = token_logprobs(mx.array(logits), (2, 0), (4, 9), count=20)

    for each, row, token in zip(found, (2, 0), (4, 9), strict=True):
        order = np.argsort(-logits[row], kind="stable")[:20]
        assert each.chosen == pytest.approx(logs[row, token], abs=1e-4)
        assert [id for id, _ in each.best] == order.tolist()
        assert [log for _, log in each.best] == pytest.approx(logs[row, order].tolist(), abs=1e-4)


def test_without_alternatives_nothing_is_sorted():
    with sorted_widths() as widths:
        (found,) = token_logprobs(mx.array(rows("normal", 1, 100, seed=2)), (0,), (4,), count=0)

    assert found.best == ()
    assert widths == []


def test_alternatives_are_at_most_all_tokens_and_a_certain_one_has_no_more_than_certainty():
    (few,) = token_logprobs(mx.array([[0.0, 2.0, 1.0]]), (0,), (1,), count=20)
    (certain,) = token_logprobs(mx.array([[0.0, 500.0]]), (0,), (1,), count=2)

    assert [id for id, _ in few.best] == [1, 2, 0]
    assert certain.chosen == 0.0
    assert all(log <= 0.0 for _, log in certain.best)
