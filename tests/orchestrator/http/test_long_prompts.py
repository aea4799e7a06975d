"""Laws of long prompts: those that can't fit are refused untokenized, and the others take turns."""

import asyncio
import threading
from typing import Any

import httpx
import pytest

from orchestrator.text.tokenizer import TextCodec
from tests.orchestrator.http.test_rules import CHAT, CODEC, COMPLETIONS, HELLO, post, talk
from tests.support.fake_pipeline import READY

LONG = "word " * (1 << 14)
"""Longer than the texts that need not wait."""


class Holding:
    """Replaces a codec's `encode`: long texts wait until `release` is set."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.entered: list[str] = []
        self._encode = CODEC.encode

    def __call__(self, text: str, special: bool = True) -> list[int]:
        self.entered.append(text)
        if len(text) >= len(LONG):
            self.release.wait()
        return self._encode(text, special)


@pytest.fixture
def holding(monkeypatch: pytest.MonkeyPatch) -> Holding:
    held = Holding()
    monkeypatch.setattr(CODEC, "encode", held)
    return held


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": LONG}),
        (COMPLETIONS, {"prompt": ["short", LONG]}),
        (CHAT, {"messages": [{"role": "user", "content": LONG}]}),
        ("/v1/responses", {"input": LONG}),
        ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": LONG}]}),
    ],
)
def test_a_text_that_can_not_fit_is_refused_untokenized(holding: Holding, path: str, body: dict[str, Any]):
    holding.release.set()

    response = post(path, body)

    assert (response.status_code, holding.entered) == (400, [])
    message = response.json()["error"]["message"]
    told = f"maximum context length is {READY.context} tokens, and the prompt has at least"
    assert ("prompt is too long: " if path == "/v1/messages" else told) in message


def test_a_text_at_the_bound_is_tokenized_and_fits():
    text = " " * (READY.context * 4)

    assert READY.context > len(CODEC.encode(text)) >= CODEC.least_tokens(text) > 1
    assert post(COMPLETIONS, {"prompt": text}).status_code == 200


def test_long_texts_take_turns_and_short_ones_pass(holding: Holding, monkeypatch: pytest.MonkeyPatch):
    # Without a bound, as for tokenizers of other kinds.
    monkeypatch.setattr(TextCodec, "least_tokens", lambda *_: 0)

    async def ask(client: httpx.AsyncClient) -> list[int]:
        long = [asyncio.create_task(client.post(COMPLETIONS, json={"prompt": LONG})) for _ in range(3)]
        try:
            while not holding.entered:
                await asyncio.sleep(0)
            short = await client.post(CHAT, json=HELLO)
            assert len(holding.entered) == 2
        finally:
            holding.release.set()
        return [each.status_code for each in (short, *await asyncio.gather(*long))]

    assert talk(ask) == [200, 400, 400, 400]
    assert len(holding.entered) == 4


def test_tokens_of_a_long_conversation_are_counted_all_the_same():
    body = {"messages": [{"role": "user", "content": LONG}]}

    assert post("/v1/messages/count_tokens", body).json()["input_tokens"] > READY.context
