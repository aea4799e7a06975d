"""The model that writes fixed texts, and what this server makes of them."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model

from orchestrator.lab.bench.servers.comparison import Contenders
from orchestrator.lab.bench.servers.scripted_pair import (
    AFTER,
    ANSWER,
    BEFORE,
    CUT_AFTER,
    PLAIN,
    TEXT_AROUND,
    THINK,
    THOUGHT,
    TWO_CALLS,
    clients,
    scripted_pair,
    thinking,
    tool_calls,
)
from orchestrator.lab.bench.servers.server_process import running
from orchestrator.text.chat_template import ChatTemplate
from orchestrator.text.tokenizer import TextCodec

MOST = 64
SUM = "".join(ANSWER)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return scripted_pair(tmp_path_factory.mktemp("models"))


def call(number: int) -> str:
    return f'<tool_call>\n{{"name": "add", "arguments": {{"a": {number}, "b": {number}}}}}\n</tool_call>'


def written(target: Path, word: str, **variables: Any) -> list[int]:
    """Greedy tokens behind a conversation that ends with this word, without the end token."""
    model, config = load_model(target)
    tokens = list(ChatTemplate(target).tokens([{"role": "user", "content": word}], **variables))
    prompt = len(tokens)
    while (token := int(mx.argmax(model(mx.array([tokens]))[0, -1]))) != config["eos_token_id"]:
        tokens.append(token)
        assert len(tokens) < prompt + MOST
    return tokens[prompt:]


@pytest.mark.parametrize(
    ("word", "text"),
    [
        (PLAIN, SUM),
        (THINK, f"<think>{''.join(THOUGHT)}</think>{SUM}"),
        (TWO_CALLS, f"{call(2)}\n{call(3)}"),
        (TEXT_AROUND, f"{BEFORE}{call(4)}{AFTER}"),
    ],
)
def test_the_last_word_selects_the_text(pair: tuple[Path, Path], word: str, text: str):
    for model in pair:
        assert TextCodec(model).decode(written(model, word)) == text


def test_the_template_can_end_the_thought_before_it_begins(pair: tuple[Path, Path]):
    assert TextCodec(pair[0]).decode(written(pair[0], THINK, enable_thinking=False)) == SUM


def test_a_cut_leaves_a_whole_call_and_the_beginning_of_another(pair: tuple[Path, Path]):
    text = TextCodec(pair[0]).decode(written(pair[0], TWO_CALLS)[:CUT_AFTER])

    assert text.startswith(f"{call(2)}\n<tool_call>")
    assert not text.endswith("</tool_call>")


@pytest.mark.slow
def test_this_server_does_what_the_comparison_asks_for(pair: tuple[Path, Path]):
    with running(Contenders.of_pair(*pair).ours) as server:
        found = {name: probe(server) for name, probe in (thinking() | tool_calls() | clients()).items()}

    assert {name: outcome for name, outcome in found.items() if outcome != "done"} == {
        "a thought": "`reasoning_content`",
        "a thought, streamed": "`reasoning_content`",
        "a malformed call": "text",
        "the beginning of the cut call": "text",
    }
