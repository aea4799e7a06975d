"""Laws of /v1/completions that chats do not have: prompts in answers, and answers that are chosen among several."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.api.result import Result
from orchestrator.http.openai.best_of import best
from protocol.messages.sampling import Likelihood
from tests.orchestrator.http.test_rules import CODEC, COMPLETIONS, chunks, post
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


def test_without_an_echo_the_answer_is_the_new_text():
    (choice,) = post(COMPLETIONS, {"prompt": "Say", "echo": False}).json()["choices"]

    assert choice["text"] == "Hello"


def result(text: str, *logs: float) -> Result:
    likelihoods = tuple(map(Likelihood, logs))
    return Result(text, (1,) * len(logs), "stop", statistics(1, len(logs)), 0, likelihoods=likelihoods)


def test_the_best_answers_have_the_highest_log_probability_per_token():
    first = [result("long", -1.0, -1.0, -1.0), result("short", -2.0), result("sure", -0.5, -0.1)]
    second = [result("x", -3.0), result("y", -1.0), result("z", -2.0)]

    assert [each.text for each in best([*first, *second], 2, 2)] == ["sure", "long", "y", "z"]


@given(logs=st.lists(st.lists(st.floats(-9, 0), max_size=3), min_size=1, max_size=5), count=st.integers(1, 5))
def test_no_answer_that_is_left_out_is_better(logs: list[list[float]], count: int):
    def mean(each: list[float]) -> float:
        return sum(each) / len(each) if each else 0.0

    kept = best([result(str(place), *each) for place, each in enumerate(logs)], 1, count)

    assert [mean(logs[int(each.text)]) for each in kept] == sorted(map(mean, logs), reverse=True)[:count]


def test_best_of_generates_more_than_it_returns_and_counts_all():
    pipeline = FakePipeline()

    answer = post(COMPLETIONS, {"prompt": ["a", "b"], "n": 2, "best_of": 3, "seed": 4, "echo": True}, pipeline).json()

    assert [(params.seed, params.logprobs) for _, params in pipeline.asked] == [(4, 0), (5, 0), (6, 0)] * 2
    assert [(choice["index"], choice["text"], choice["logprobs"]) for choice in answer["choices"]] == [
        (0, "aHello", None),
        (1, "aHello", None),
        (2, "bHello", None),
        (3, "bHello", None),
    ]
    assert answer["usage"]["completion_tokens"] == 6 * 5


def test_a_best_of_that_equals_n_changes_nothing():
    pipeline = FakePipeline()

    post(COMPLETIONS, {"prompt": "a", "n": 2, "best_of": 2, "stream": True}, pipeline)

    assert [params.logprobs for _, params in pipeline.asked] == [None, None]
