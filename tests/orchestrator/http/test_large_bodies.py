"""Laws of large bodies and long prompts: they are read beside the event loop, one at a time, and refused early."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from orchestrator.http import request_bodies
from orchestrator.http.errors import ApiError
from orchestrator.http.openai.request import MOST_MESSAGES, ChatRequest, CompletionRequest
from orchestrator.http.request_bodies import MOST_CONTAINERS, MOST_VALUES, decoded
from orchestrator.text.tokenizer import MOST_CHARACTERS
from tests.support.asked_server import CHAT, CODEC, COMPLETIONS, HELLO, Gate, post, talk
from tests.support.fake_pipeline import READY, FakePipeline

LONG = "word " * (1 << 14)
"""Longer than the bodies that need not wait."""


ROOMY = 1 << 13
ROOM = FakePipeline(condition=structs.replace(READY, context=ROOMY))
"""With a context that this text is too long for, but not by far."""


def saying(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def asking(content: Any) -> list[tuple[str, Any]]:
    """Requests of each API whose messages have this content."""
    return [
        (CHAT, {"messages": saying(content)}),
        ("/v1/responses", {"input": saying(content)}),
        ("/v1/responses/input_tokens", {"input": saying(content)}),
        ("/v1/messages", {"max_tokens": 1, "messages": saying(content)}),
        ("/v1/messages/count_tokens", {"messages": saying(content)}),
        ("/api/chat", {"messages": saying(content)}),
    ]


LONG_BODIES = [*asking(LONG), (COMPLETIONS, {"prompt": LONG}), ("/api/generate", {"prompt": LONG})]
EMBEDDINGS = [(path, {"input": LONG, "prompt": LONG}) for path in ("/v1/embeddings", "/api/embed", "/api/embeddings")]


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """The check of a body's bounds, with which all reading begins."""
    held = Gate(lambda _: None, len(LONG))
    monkeypatch.setattr(request_bodies, "_require_bounds", held)
    yield held
    held.go.set()


@pytest.mark.parametrize(("path", "body"), [*LONG_BODIES, *EMBEDDINGS])
def test_others_are_answered_while_long_bodies_are_read_one_at_a_time(path: str, body: Any, reading: Gate):
    async def ask(client: httpx.AsyncClient) -> int:
        long = [asyncio.create_task(client.post(path, json=body)) for _ in range(3)]
        while not reading.threads:
            await asyncio.sleep(0)
        short = await client.post(CHAT, json=HELLO)
        assert len(reading.threads) == 1
        reading.go.set()
        await asyncio.gather(*long)
        return short.status_code

    assert talk(ask) == 200
    assert len(reading.threads) == 3
    assert threading.main_thread() not in reading.threads


@pytest.mark.parametrize(("path", "body"), LONG_BODIES)
def test_long_bodies_are_translated_beside_the_loop(path: str, body: Any, monkeypatch: pytest.MonkeyPatch):
    threads: list[threading.Thread] = []
    for kind in (ChatRequest, CompletionRequest):
        monkeypatch.setattr(kind, "refuse_unsupported", lambda _: threads.append(threading.current_thread()))

    post(path, body)

    assert threads
    assert threading.main_thread() not in threads


PARTS = "The body has more than 65,536 lists and objects: send fewer messages"
MANY = [
    *((path, body, PARTS) for path, body in asking([{"type": "text", "text": "x"}] * MOST_CONTAINERS)),
    (COMPLETIONS, {"prompt": [1] * (MOST_VALUES + 2)}, f"more than {MOST_VALUES:,} values"),
    *(
        (
            path,
            {**body, field: saying("x") * (MOST_MESSAGES + 1)},
            f"{field} must be a list of length <= {MOST_MESSAGES}.",
        )
        for path, body in asking("x")
        for field in ("input", "messages")
        if field in body
    ),
]


@pytest.mark.parametrize(("path", "body", "words"), MANY)
def test_too_many_parts_values_or_messages_are_refused(path: str, body: Any, words: str):
    response = post(path, body)

    assert response.status_code == 400
    assert words in response.text
    assert path != "/v1/responses" or words == PARTS or response.json()["error"]["param"] == "input"


def test_brackets_and_commas_of_a_text_are_not_counted():
    text = '[{"a\\": [1,\\\\"' * (MOST_CONTAINERS // 2)
    body = json.dumps({"messages": saying(text + "," * MOST_VALUES)}).encode()

    assert decoded(body, ChatRequest).messages[0]["content"].startswith(text)


JSON = st.recursive(
    st.one_of(st.none(), st.integers(0, 9), st.text('a"\\[]{},é', max_size=8)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('a"\\[{,', max_size=3), inner, max_size=4),
    max_leaves=20,
)


def containers(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + sum(map(containers, inner))


@given(value=JSON, most=st.integers(1, 12), size=st.integers(1, 9), ascii_alone=st.booleans())
def test_exactly_the_bodies_beyond_the_bound_are_refused(value: Any, most: int, size: int, ascii_alone: bool):
    body = json.dumps({"messages": [{"role": "user", "x": value}]}, ensure_ascii=ascii_alone).encode()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_bodies, "MOST_CONTAINERS", most)
        patch.setattr(request_bodies, "_SLICE", size)
        beyond = containers(value) + 3 > most
        with pytest.raises(ApiError, match="lists and objects") if beyond else nullcontext():
            decoded(body, ChatRequest)


# Long prompts ------------------------------------------------------------------------------------


@pytest.fixture
def holding(monkeypatch: pytest.MonkeyPatch) -> Gate:
    held = Gate(CODEC.encode, len(LONG))
    monkeypatch.setattr(CODEC, "encode", held)
    return held


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": LONG}),
        (COMPLETIONS, {"prompt": ["short", LONG]}),
        ("/v1/responses/input_tokens", {"input": LONG}),
        (CHAT, {"messages": [{"role": "user", "content": LONG}]}),
        ("/v1/responses", {"input": LONG}),
        ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": LONG}]}),
    ],
)
def test_a_text_that_can_not_fit_is_refused_untokenized(holding: Gate, path: str, body: dict[str, Any]):
    holding.go.set()

    response = post(path, body)

    assert (response.status_code, holding.calls) == (400, 0)
    message = response.json()["error"]["message"]
    told = f"maximum context length is {READY.context} tokens, and the prompt has about"
    assert ("prompt is too long: " if path == "/v1/messages" else told) in message


def test_a_text_at_the_bound_is_tokenized_and_fits():
    text = " " * (READY.context * MOST_CHARACTERS)

    assert post(COMPLETIONS, {"prompt": text}).status_code == 200
    assert post(COMPLETIONS, {"prompt": text + " "}).json()["error"]["code"] == "context_length_exceeded"


def test_long_texts_take_turns_and_short_ones_pass(holding: Gate):
    async def ask(client: httpx.AsyncClient) -> list[int]:
        long = [asyncio.create_task(client.post(COMPLETIONS, json={"prompt": LONG})) for _ in range(3)]
        try:
            while not holding.calls:
                await asyncio.sleep(0)
            short = await client.post(CHAT, json=HELLO)
            assert holding.calls == 2
        finally:
            holding.go.set()
        return [each.status_code for each in (short, *await asyncio.gather(*long))]

    assert talk(ask, ROOM) == [200, 400, 400, 400]
    assert holding.calls == 4


def test_tokens_of_a_long_conversation_are_counted_all_the_same():
    body = {"messages": [{"role": "user", "content": LONG}]}

    assert post("/v1/messages/count_tokens", body, ROOM).json()["input_tokens"] > ROOMY
