"""Text to token ids and back, a few tokens at a time. Knows the tokenizer's files, and no model."""

import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from protocol.errors import InputError

_HALF = "\N{REPLACEMENT CHARACTER}"
"""What a decoder makes of bytes that are no character, or not yet one."""
_BLANK = "\N{LOWER ONE EIGHTH BLOCK}"
"""How SentencePiece writes a blank."""
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""As SentencePiece writes a space."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def _bytes_by_character() -> dict[str, int]:
    """Byte-level tokenizers write bytes that are to be seen as themselves and the others, in order, from U+0100 on
    (Radford et al. 2019, GPT-2's encoder)."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_BYTES = _bytes_by_character()


class TextCodec:
    """The tokenizer of one model folder."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = _load(folder)
        self.eos = _eos_ids(folder, self._tokenizer)
        """Ids after which the model has nothing more to say."""
        added = self._tokenizer.get_added_tokens_decoder()
        self._added = added.keys()
        self._silent = self.eos | {id for id, token in added.items() if token.special}

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Ids of `text`, with the special tokens (BOS, say) that tokenizer.json's post-processor adds if `special`."""
        return self._tokenizer.encode(text, add_special_tokens=special).ids

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of `tokens`, without special and end tokens; bytes that are no character become U+FFFD."""
        return self._tokenizer.decode([token for token in tokens if token not in self._silent])

    def shown(self, token: int) -> str:
        """One token alone, for people to look at: special tokens by their names, half characters as U+FFFD."""
        name = self._tokenizer.id_to_token(token) or ""
        if token in self._silent:
            return name
        text = self._tokenizer.decode([token])
        # Such tokenizers drop the blank before a text's first word.
        return " " + text if name.startswith(_BLANK) and not text.startswith(" ") else text

    def spelt(self, token: int) -> bytes:
        """What a token alone stands for; nothing for an id that no token has."""
        written = self._tokenizer.id_to_token(token)
        if written is None or token in self._added:
            return (written or "").encode()
        if self._byte_level:
            return bytes(_BYTES[character] for character in written if character in _BYTES)
        if byte := _BYTE_TOKEN.fullmatch(written):
            return bytes.fromhex(byte[1])
        return written.replace(_SPACE, " ").encode()

    @cached_property
    def _byte_level(self) -> bool:
        """The tokens are written a character a byte."""
        return "ByteLevel(" in repr(self._tokenizer.decoder)

    def stream(self) -> "TextStream":
        """A fresh stream, which begins like `decode` does."""
        return TextStream(self)


class TextStream:
    """Tokens in, text out: the pieces joined equal `TextCodec.decode` of all tokens."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._window: list[int] = []
        """Tokens since the last but one clean border: a token's text may depend on its left neighbour."""
        self._settled = 0
        """Length of `_window` at the last clean border, where no character is half told."""
        self._told = 0
        """Characters of the window's text that were returned."""

    def push(self, tokens: Sequence[int]) -> str:
        """The text that is certain now; a character whose bytes are incomplete waits for the rest."""
        self._window.extend(tokens)
        text = self._codec.decode(self._window)
        certain = text.rstrip(_HALF)
        piece = certain[self._told :]
        self._told = max(self._told, len(certain))
        if piece and certain == text:
            self._move_on()
        return piece

    def finish(self) -> str:
        """What was held back, as `decode` would show it. The stream is used up."""
        text = self._codec.decode(self._window)
        piece = text[self._told :]
        self._told = len(text)
        return piece

    def _move_on(self) -> None:
        self._window = self._window[self._settled :]
        self._settled = len(self._window)
        self._told = len(self._codec.decode(self._window))


def _load(folder: Path) -> Tokenizer:
    try:
        content = (folder / "tokenizer.json").read_bytes()
    except OSError as error:
        raise InputError(f"{folder} has no readable tokenizer.json: pass the folder of a complete model.") from error
    try:
        tokenizer = Tokenizer.from_buffer(content)
    except ValueError as error:
        raise InputError(f"{folder}/tokenizer.json is broken ({error}): download the model again.") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _eos_ids(folder: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """The union of what the three files name: chat models list a turn's end in one and a text's end in another."""
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        named = _json(folder / name).get("eos_token_id")
        ids.update(id for id in (named if isinstance(named, list) else [named]) if isinstance(id, int))
    token = _json(folder / "tokenizer_config.json").get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    id = tokenizer.token_to_id(token) if isinstance(token, str) else None
    return frozenset(ids if id is None else ids | {id})


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise InputError(f"{path} is broken ({error}): download the model again.") from error
    return content if isinstance(content, dict) else {}
