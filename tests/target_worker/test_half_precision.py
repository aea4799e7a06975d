"""What a target decides in float16 and bfloat16, the types of a Mac: trees and several requests give the tokens of
single rounds."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest

from protocol.inference.language_model import LanguageModel
from protocol.messages.sampling import Sampling
from protocol.messages.worker import Forest
from target_worker.verification import token_logprobs
from tests.support.models.architectures import tiny
from tests.support.models.tiny_models import VOCABULARY
from tests.support.target_requests import GREEDY, LONG_PROMPT, Request, answers, start, target

both_kinds = pytest.mark.parametrize("kind", [mx.float16, mx.bfloat16])
ROUNDS = 8
WARM = Sampling(temperature=0.7, seed=3, top_p=0.9, logprobs=2)


def halved(stock: Any, kind: mx.Dtype) -> LanguageModel:
    stock.set_dtype(kind)
    return LanguageModel(stock)


def tree(text: Sequence[int], place: int) -> tuple[list[int], list[int]]:
    """Three right tokens behind the place, each with a wrong one beside it."""
    tokens: list[int] = []
    parents: list[int] = []
    for depth, token in enumerate(text[place : place + 3]):
        tokens += [token, (token + 1) % VOCABULARY]
        parents += [2 * depth - 1 if depth else 0] * 2
    return tokens, parents


@both_kinds
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
@pytest.mark.parametrize("sampling", [GREEDY, WARM])
def test_trees_of_several_requests_in_one_forward_give_the_tokens_of_single_rounds(
    name: str, sampling: Sampling, kind: mx.Dtype
):
    made = halved(tiny(name), kind)
    assert (made.level, made.joins) == ("tree", True)
    prompts = (LONG_PROMPT, LONG_PROMPT[:31])
    texts = [Request(target(made), start(prompt, sampling)).decode(4 * ROUNDS) for prompt in prompts]

    worker = target(made)
    requests = [Request(worker, start(prompt, sampling, id)) for id, prompt in enumerate(prompts, 1)]
    for _ in range(ROUNDS):
        trees = [each.verify(*tree(text, len(each.tokens))) for each, text in zip(requests, texts, strict=True)]
        replies = answers(worker, Forest(tuple(trees)))
        assert all(len(each.fold(verify, replies).path) == 3 for each, verify in zip(requests, trees, strict=True))

    assert [each.tokens for each in requests] == texts


@both_kinds
def test_log_probabilities_are_those_of_the_same_logits_in_float32(kind: mx.Dtype):
    logits = (mx.random.normal((4, VOCABULARY), key=mx.random.key(4)) * 3).astype(kind)
    told = token_logprobs(logits, range(4), (8, 2, 60, 7), 5)
    assert told == token_logprobs(logits.astype(mx.float32), range(4), (8, 2, 60, 7), 5)
