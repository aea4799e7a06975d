"""The markers of one syntax in one model, as parts of a grammar. Pure."""

import re
from collections.abc import Mapping, Sequence

from orchestrator.text.tokenizer import TextCodec
from protocol.messages.grammar import Form, Text


class Marks:
    """Those that are tokens of the model stand in a grammar as tokens, others as letters."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self.tokens = tokens
        self._pattern = re.compile(f"({'|'.join(map(re.escape, tokens))})") if tokens else None

    @classmethod
    def of(cls, markers: Sequence[str], codec: TextCodec) -> "Marks":
        ids = {marker: codec.id_of(marker) for marker in markers}
        return cls({marker: token for marker, token in ids.items() if token is not None})

    def form(self, text: str) -> Form:
        """`text` with the tokens in it."""
        pieces = self._pattern.split(text) if self._pattern else [text]
        return tuple(self.tokens.get(piece, piece) for piece in pieces if piece)

    def text_up_to(self, end: str, never: Sequence[str] = ()) -> Text:
        """Any text and the marker `end`. `never`: what would end it too."""
        return Text(end, self.tokens.get(end), tuple(never))
