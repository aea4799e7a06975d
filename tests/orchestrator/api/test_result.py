"""Laws of a result: its fields by name, its figures as text."""

import re
from typing import Any, cast

import pytest
from msgspec.structs import replace
from rich.console import Console

from orchestrator import Result
from orchestrator.cli import printing
from orchestrator.cli.commands.chat import status
from tests.support.fake_pipeline import statistics

RESULT = Result("def f():", (1, 2), "length", statistics(7, 2), seed=3)


def test_a_field_is_also_an_item():
    assert all(RESULT[name] == value for name, value in vars(RESULT).items())
    assert "text" in RESULT
    assert "outputs" not in RESULT


def test_an_unknown_item_is_refused_with_the_names_of_the_known_ones():
    with pytest.raises(KeyError, match="no 'summary', but text, tokens, finish_reason"):
        RESULT["summary"]


def test_a_result_that_is_taken_for_a_list_says_what_gives_one():
    with pytest.raises(TypeError, match="give a list of prompts"):
        RESULT[0]
    with pytest.raises(TypeError, match="give a list of prompts"):
        list(cast("Any", RESULT))


def test_a_summary_tells_speed_and_acceptance():
    first, *lines = RESULT.summary().splitlines()

    assert first == "10.0 tokens/s"
    assert [" ".join(line.split()) for line in lines][:6] == [
        "tokens 2 after a prompt of 7",
        "adopted 1 tokens whose KV was there already",
        "time to first token 100 ms",
        "rounds 2, 2.00 tokens a round",
        "hit rate 75%",
        "acceptance 50%",
    ]


@pytest.mark.parametrize(
    ("reason", "most", "said"),
    [
        ("stop", 2, ""),
        ("length", 2, "its limit of 2 tokens (--max-tokens)"),
        ("length", 3, "Full."),
        ("length", None, "Full."),
    ],
)
def test_an_answer_that_a_limit_ended_says_which(reason: Any, most: int | None, said: str):
    sentence = printing.cut_off(Result("a b", (1, 2), reason, statistics(7, 2), seed=3), most, if_full="Full.")

    assert said in sentence
    assert bool(sentence) == bool(said)


@pytest.mark.parametrize(("overlapped", "hits"), [(0, ""), (1, ""), (2, "hit rate 75%")])
def test_what_speculation_gained_is_shown_and_hits_only_where_draft_and_target_compute_at_once(
    overlapped: int, hits: str
):
    gained = replace(statistics(7, 2), plain_tokens_per_second=6.25, overlapped_rounds=overlapped)
    result = Result("def f():", (1, 2), "length", gained, seed=3)
    console = Console(width=200)
    with console.capture() as captured:
        console.print(printing.summary(result, sampled=True))
    panel = [" ".join(line.strip("│╭╰─╮╯\n ").split()) for line in captured.get().splitlines()][:-1]

    assert panel == [
        "10.0 tokens/s",
        "seed 3",
        "tokens 2 after a prompt of 7",
        "rounds 2, 2.00 tokens a round",
        "speed-up about 1.6 times plain decoding (about 6.2 tokens/s, estimated)",
    ]
    line = "2 tokens · 10.0 tokens/s · 1.6× plain decoding · 2.0 tokens a round"
    assert status(2, 10.0, gained) == " · ".join(filter(None, (line, hits)))
    assert re.findall("hit rate .*", re.sub(" +", " ", result.summary())) == list(filter(None, (hits,)))
