"""Text to token ids and back, a few tokens at a time. Knows the tokenizer's files, and no model."""

import codecs
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer

from orchestrator.text.plain_text import BREAK, PlainTextTokenizer, controls, encoded
from orchestrator.text.template_sources import written_behind_answers
from protocol.contracts.model_folder import ModelFolder
from protocol.contracts.tokenizer_fingerprint import tokenizer_file
from protocol.errors import InputError

MOST_CHARACTERS = 16
"""Of a token, on average over a text that fills a context. English has 4 or 5, and code with deep indentation 8."""
_MOST_TOKENS = 1 << 31
"""Ids of tokens are below it on the wire."""
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""A decoder returns it for bytes that are no character, or the beginning of one."""
MARK = "\ufdd0"
"""Comes before the text of a marked token. In a stream with such tokens, one that is text itself is doubled."""
_WINDOW = 32
"""Most tokens that a stream decodes again with the next one."""
_CONTEXT = 8
"""Tokens that are left of them: more than an incomplete character and the token before it have."""
_INCOMPLETE = 3
"""Most bytes of an incomplete character."""
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""A space in SentencePiece's tokens."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def _bytes_by_character() -> dict[str, int]:
    """The characters of byte-level tokenizers: printable bytes are themselves, the others follow from U+0100 on
    (Radford et al. 2019, GPT-2's encoder)."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_BYTES = _bytes_by_character()


class TextCodec:
    """The tokenizer of one model folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tokenizer = _load(folder)
        self.eos = _eos_ids(folder, self._tokenizer)
        """Ids of the tokens that end a text."""
        added = self._tokenizer.get_added_tokens_decoder()
        self._added = added.keys()
        self.controls = {token.content: token.special for token in added.values() if controls(token.content)}
        """Texts of added tokens that can control the model, and whether they are special."""
        self._silent = self.eos | {id for id, token in added.items() if token.special}

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Ids of `text`, with the special tokens (BOS, say) that tokenizer.json's post-processor adds if `special`. A
        text that begins with BOS gets no second one. Raises InputError for a text that a pattern of tokenizer.json
        can't be matched with."""
        ids = encoded(self._tokenizer, text, special)
        begin = self._begin if special else []
        return ids[len(begin) :] if begin and ids[len(begin) : 2 * len(begin)] == begin else ids

    def encode_rendered(self, text: str, begins: bool = True) -> list[int]:
        """Ids of a conversation that `ChatTemplate.render` returned, or of a part that does not begin it: only BOS is
        added, where the tokenizer adds one and the template does not. Raises InputError as `encode`."""
        ids = self._plain_text.encode(text) if BREAK in text else self.encode(text, special=False)
        return ids if not begins or ids[: len(self._begin)] == self._begin else [*self._begin, *ids]

    def decode(self, tokens: Iterable[int], shown: frozenset[int] = frozenset()) -> str:
        """Text of `tokens`, without special and end tokens; bytes that are no character become U+FFFD.

        `shown`: special tokens whose text is included.
        """
        # As in `encode`, the form for one text would hold the interpreter's lock.
        return self._tokenizer.decode_batch([self.visible(tokens, shown)], skip_special_tokens=not shown)[0]

    def id_of(self, token: str) -> int | None:
        """The id of a token given by its text; None if the vocabulary does not have it."""
        return self._tokenizer.token_to_id(token)

    def count(self, text: str) -> int:
        """Number of tokens of a text without special tokens."""
        return len(self.encode(text, special=False))

    def hidden(self, tokens: Iterable[str]) -> frozenset[int]:
        """Ids of those `tokens` whose text `decode` leaves out, end tokens excepted."""
        ids = {self._tokenizer.token_to_id(token) for token in tokens}
        return frozenset(id for id in ids if id is not None and id in self._silent - self.eos)

    def shown(self, token: int) -> str:
        """One token as text to display: special tokens by name, incomplete characters as U+FFFD."""
        name = self._tokenizer.id_to_token(token) or ""
        if token in self._silent:
            return name
        text = self._tokenizer.decode([token])
        # Such tokenizers drop the space before a text's first word.
        return " " + text if name.startswith(_SPACE) and not text.startswith(" ") else text

    def spelt(self, token: int) -> bytes:
        """The bytes of one token; empty for an unknown id."""
        written = self._tokenizer.id_to_token(token)
        if written is None or token in self._added:
            return (written or "").encode()
        if self._byte_level:
            return bytes(_BYTES[character] for character in written if character in _BYTES)
        if byte := _BYTE_TOKEN.fullmatch(written):
            return bytes.fromhex(byte[1])
        return written.replace(_SPACE, " ").encode()

    def lengths(self, tokens: Iterable[int]) -> list[int]:
        """Characters of text that are complete with each token. They sum up to the length of `decode`, but for a
        character that is incomplete at the end."""
        if not self._byte_level:
            stream = self.stream()
            return [len(stream.push([token])) for token in tokens]
        # A stream decodes bytes that are no character again with each further token.
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return [len(decoder.decode(b"" if token in self._silent else self.spelt(token))) for token in tokens]

    @cached_property
    def _plain_text(self) -> PlainTextTokenizer:
        return PlainTextTokenizer(self._tokenizer)

    @cached_property
    def _begin(self) -> list[int]:
        """What the post-processor puts before a text."""
        found = self._tokenizer.encode("a")
        added = found.special_tokens_mask
        return found.ids[: added.index(0)] if 0 in added else []

    @cached_property
    def _byte_level(self) -> bool:
        """Whether each character of a token stands for one byte."""
        return "ByteLevel(" in repr(self._tokenizer.decoder)

    def stream(self, shown: frozenset[int] = frozenset(), marked: frozenset[int] = frozenset()) -> "TextStream":
        """A new stream, which begins like `decode`. `marked`: tokens whose text gets a `MARK` before it."""
        return TextStream(self, shown, marked)

    def visible(self, tokens: Iterable[int], shown: frozenset[int] = frozenset()) -> list[int]:
        """Those of `tokens` that `decode` does not leave out."""
        return [token for token in tokens if token in shown or token not in self._silent]


class TextStream:
    """Tokens in, text out: the pieces joined equal `TextCodec.decode` of all tokens, but for the marks."""

    def __init__(
        self, codec: TextCodec, shown: frozenset[int] = frozenset(), marked: frozenset[int] = frozenset()
    ) -> None:
        self._codec = codec
        self._shown = shown
        self._marked = marked
        self._window: list[int] = []
        """Tokens since the last but one clean border: a token's text may depend on its left neighbour."""
        self._settled = 0
        """Length of `_window` at the last clean border: no character was incomplete there."""
        self._returned = 0
        """Characters of the window's text that were returned."""

    def push(self, tokens: Sequence[int]) -> str:
        """The text that is certain now; a character whose bytes are incomplete waits for the rest."""
        return "".join(self._with_mark(token) if token in self._marked else self._push(token) for token in tokens)

    def finish(self) -> str:
        """The text that `push` held back, as `decode` returns it. Ends the stream."""
        text = self._codec.decode(self._window, self._shown)
        piece = text[self._returned :]
        self._returned = len(text)
        return self._escaped(piece)

    def _with_mark(self, token: int) -> str:
        piece, own = self._push(token), self._codec.decode([token], self._shown)
        before = piece.removesuffix(own)
        return piece if before == piece else before + MARK + own

    def _push(self, token: int) -> str:
        self._window += self._codec.visible([token], self._shown)
        text = self._codec.decode(self._window, self._shown)
        certain = text.rstrip(_REPLACEMENT)
        bounded = len(self._window) - self._settled <= _WINDOW
        if not bounded:
            certain += text[len(certain) : -_INCOMPLETE]
        piece = certain[self._returned :]
        self._returned = max(self._returned, len(certain))
        if piece and certain == text:
            self._advance()
        elif not bounded:
            self._shorten(len(text) - self._returned)
        return self._escaped(piece)

    def _escaped(self, piece: str) -> str:
        return piece.replace(MARK, 2 * MARK) if self._marked else piece

    def _shorten(self, held: int) -> None:
        """Forget tokens on which the text to come does not depend. `held`: characters that were not returned."""
        self._window = self._window[-_CONTEXT:]
        self._settled = 0
        self._returned = max(0, len(self._codec.decode(self._window, self._shown)) - held)

    def _advance(self) -> None:
        self._window = self._window[self._settled :]
        self._settled = len(self._window)
        self._returned = len(self._codec.decode(self._window, self._shown))


def _load(folder: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_buffer(tokenizer_file(folder))
    except ValueError as error:
        raise InputError(f"{folder}/tokenizer.json is broken ({error}): download the model again.") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _eos_ids(folder: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """The union of three files: chat models name the end of a turn in one and the end of a text in another. Where none
    of them is what the template writes behind an answer, the first special token there too."""
    model, ids = ModelFolder(folder), set[int]()
    for name in ("generation_config.json", "config.json"):
        named = model.settings(name).get("eos_token_id")
        ids.update(id for id in (named if isinstance(named, list) else [named]) if isinstance(id, int))
    # Some models say -1 for none.
    ids = {id for id in ids if id >= 0}
    if ids and max(ids) >= _MOST_TOKENS:
        raise InputError(f"{folder} names an eos_token_id that is no token: correct its config.json.")
    token = model.settings("tokenizer_config.json").get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    id = tokenizer.token_to_id(token) if isinstance(token, str) else None
    ids |= set() if id is None else {id}
    special = {id for id, added in tokenizer.get_added_tokens_decoder().items() if added.special}
    behind = [
        id for id in tokenizer.encode(written_behind_answers(folder), add_special_tokens=False).ids if id in special
    ]
    return frozenset(ids if ids.intersection(behind) else ids.union(behind[:1]))
