"""Prompts to tokens, beside the event loop: meanwhile the server sends the tokens of other requests."""

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TypeAlias

from orchestrator.http.access.disconnects import in_thread
from orchestrator.http.errors import PromptTooLong
from orchestrator.text.tokenizer import TextCodec

_SHORT_CHARACTERS = 1 << 16
"""Of all texts of a request; longer ones take turns."""

Prompt: TypeAlias = str | Sequence[int]
"""Text, or token ids."""


class PromptEncoder:
    """Encodes prompts in threads. Long texts take turns, because each takes up to 200 times its length in memory."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._turn = asyncio.Lock()

    async def encode(
        self, prompts: Sequence[Prompt], *, special: bool, context: int | None = None
    ) -> list[Sequence[int]]:
        """`special`: as in `TextCodec.encode`. Raises ApiError for a text that is too long for `context` tokens
        whatever its tokens are; other texts may be too long as well."""
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if context is not None:
            await asyncio.to_thread(self._require_room, texts, context)
        async with self._turn if sum(map(len, texts)) > _SHORT_CHARACTERS else nullcontext():
            return await in_thread(self._encode, prompts, special)

    def _encode(self, prompts: Sequence[Prompt], special: bool) -> list[Sequence[int]]:
        return [self._codec.encode(each, special) if isinstance(each, str) else each for each in prompts]

    def _require_room(self, texts: Sequence[str], context: int) -> None:
        for text in texts:
            # A token is a character at least, where texts have a bound at all.
            if len(text) >= context and (least := self._codec.least_tokens(text)) >= context:
                raise PromptTooLong(least, context, "at least ")
