"""Laws of /v1/completions that chats do not have: prompts in answers."""

from dataclasses import replace
from typing import Any

import pytest

from orchestrator.api.result import Result
from protocol.messages.sampling import TokenLogprob
from tests.support.asked_server import CODEC, COMPLETIONS, chunks, post
from tests.support.fake_pipeline import FakePipeline, statistics


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "texts"),
    [("Say", ["Say"]), (["a", "b"], ["a", "b"]), (CODEC.encode("Say it"), ["Say it"])],
)
def test_an_echo_puts_each_prompt_before_its_answers(prompt: Any, texts: list[str], stream: bool):
    answer = post(COMPLETIONS, {"prompt": prompt, "echo": True, "n": 2, "stream": stream})

    found = [""] * 2 * len(texts)
    for part in chunks(answer) if stream else [answer.json()]:
        for choice in part["choices"]:
            found[choice["index"]] += choice["text"]
    assert found == [f"{text}Hello" for text in texts for _ in range(2)]


def result(text: str, *logs: float) -> Result:
    token_logprobs = tuple(map(TokenLogprob, logs))
    return Result(text, (1,) * len(logs), "stop", statistics(1, len(logs)), 0, token_logprobs=token_logprobs)


# Log-probabilities of prompts ---------------------------------------------------------------------

TOKENS = CODEC.encode("Say it, caf\u00e9")
KNOWN = tuple(TokenLogprob(-0.5 - place, ((7, -0.25),)) for place in range(len(TOKENS) - 1))


ANSWER = replace(result("", -3.0), prompt_token_logprobs=KNOWN)
"""One token without text."""


def echoed(**asked: Any) -> Any:
    pipeline = FakePipeline(lambda _: [], result=ANSWER)
    answer = post(COMPLETIONS, {"prompt": TOKENS, "echo": True, "logprobs": 1, "max_tokens": 1, **asked}, pipeline)
    ((_, params),) = pipeline.asked
    assert (params.prompt_logprobs, params.max_tokens) == (True, 1)
    return answer.json()


def test_an_echo_with_logprobs_tells_of_every_token_and_where_it_begins_the_end_token_included():
    (choice,) = echoed()["choices"]

    told = choice["logprobs"]
    assert choice["text"] == "Say it, caf\u00e9"
    assert [len(each) for each in told.values()] == [len(TOKENS) + 1] * 4
    assert told["token_logprobs"] == [None, *(token_logprob.chosen for token_logprob in KNOWN), -3.0]
    assert (told["top_logprobs"][0], told["text_offset"][0], told["text_offset"][-1]) == (None, 0, len(choice["text"]))
    for token, spelt, likely in zip(TOKENS[1:], told["tokens"][1:-1], told["top_logprobs"][1:-1], strict=True):
        assert spelt == CODEC.spelt(token).decode("utf-8", "backslashreplace")
        assert spelt in likely
    ends = [*told["text_offset"][1:], len(choice["text"])]
    for token, begin, end in zip(told["tokens"][:-1], told["text_offset"], ends, strict=False):
        assert choice["text"][begin:end] == token or "\\x" in token


def test_an_echo_with_max_tokens_0_has_the_prompt_alone():
    answer = echoed(max_tokens=0, logprobs=0)

    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("Say it, caf\u00e9", "length")
    assert len(choice["logprobs"]["tokens"]) == len(TOKENS)
    assert answer["usage"]["completion_tokens"] == 0


def test_without_logprobs_an_echo_asks_for_none():
    pipeline = FakePipeline()

    answer = post(COMPLETIONS, {"prompt": "Say", "echo": True, "max_tokens": 0}, pipeline).json()

    assert not pipeline.asked[0][1].prompt_logprobs
    assert [(choice["text"], choice["logprobs"]) for choice in answer["choices"]] == [("Say", None)]
