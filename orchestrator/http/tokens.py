"""/tokenize, /detokenize and /apply-template, with the fields of llama.cpp's server and of vLLM's."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from orchestrator.http.embeddings import json_response
from orchestrator.http.errors import wrong
from orchestrator.http.generation import warned
from orchestrator.http.openai.model_server import ModelServer
from orchestrator.http.openai.request import ChatRequest, question
from orchestrator.http.request_bodies import converted, decoded, read_body
from orchestrator.http.work import in_thread
from orchestrator.text.plain_text import without_breaks
from protocol.messages.base import Token

TOKENIZE, DETOKENIZE, APPLY_TEMPLATE = "/tokenize", "/detokenize", "/apply-template"
_SLICE = 1 << 14
"""Tokens."""


class _Text(msgspec.Struct):
    """`content` is llama.cpp's name, `prompt` is vLLM's, whose tokens have the special ones around a text."""

    content: str | None = None
    prompt: str | None = None
    add_special: bool = False
    add_special_tokens: bool = True
    with_pieces: bool = False
    return_token_strs: bool | None = None
    model: str | None = None


class _Tokens(msgspec.Struct):
    tokens: tuple[Token, ...]
    model: str | None = None


class TokenRoutes:
    def __init__(self, server: ModelServer) -> None:
        self._server = server

    @property
    def routes(self) -> list[Route]:
        return [
            Route(TOKENIZE, self.tokenize, methods=["POST"]),
            Route(DETOKENIZE, self.detokenize, methods=["POST"]),
            Route(APPLY_TEMPLATE, self.apply_template, methods=["POST"]),
        ]

    async def tokenize(self, request: Request) -> Response:
        """The tokens of a text, or of a conversation."""
        asked, chat = await read_body(request, _text_or_chat)
        self._server.model_name(asked.model)
        if asked.prompt is not None:
            text, special = asked.prompt, asked.add_special_tokens
        else:
            text, special = asked.content or "", asked.add_special
        prepared = await self._server.encoded(request, text if chat is None else chat, special=special)
        (tokens,) = prepared.tokens
        state = (await self._server.health.check()).serving
        told = {"count": len(tokens), "max_model_len": state and state.context}
        return await in_thread(self._tokenized, tokens, asked, told)

    def _tokenized(self, tokens: Sequence[int], asked: _Text, told: dict[str, Any]) -> Response:
        def spelt(token: int) -> str:
            return self._server.codec.spelt(token).decode(errors="replace")

        if asked.return_token_strs:
            told["token_strs"] = _listed(tokens, spelt)
        pieced = asked.with_pieces
        listed = _listed(tokens, lambda token: {"id": token, "piece": spelt(token)} if pieced else token)
        return json_response({"tokens": listed, **told})

    async def detokenize(self, request: Request) -> Response:
        """The text of tokens, special ones too."""
        asked = await read_body(request, lambda content: decoded(content, _Tokens))
        self._server.model_name(asked.model)
        text = await in_thread(self._server.codec.decode, asked.tokens, frozenset(asked.tokens))
        return json_response({"content": text, "prompt": text})

    async def apply_template(self, request: Request) -> Response:
        """A conversation as the model reads it."""
        _, chat = await read_body(request, _text_or_chat)
        if chat is None:
            raise wrong("messages", "There are no messages: give at least one.")
        self._server.model_name(chat.model)
        prepared = await self._server.prepared(request, chat)
        return json_response({"prompt": without_breaks(str(prepared.prompts[0])), **warned(prepared.warnings)})


def _listed(tokens: Sequence[int], shown: Callable[[int], Any]) -> msgspec.Raw:
    """JSON of what is shown of each token, in little memory, a slice at a time: other threads run between them."""
    encoded = cache(lambda token: msgspec.json.encode(shown(token)))
    slices = (tokens[begin : begin + _SLICE] for begin in range(0, len(tokens), _SLICE))
    return msgspec.Raw(b"[" + b",".join(b",".join(map(encoded, each)) for each in slices) + b"]")


def _text_or_chat(content: bytes) -> tuple[_Text, ChatRequest | None]:
    fields = decoded(content, dict[str, Any])
    return converted(fields, _Text), question(fields, ChatRequest) if "messages" in fields else None
