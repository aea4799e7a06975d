"""How many characters of text one token can stand for, by the content of tokenizer.json. Pure."""

import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

_COMPOSITION = 4
"""Characters that NFC joins to one at most: the largest expansion of NFD (Unicode's FAQ on normalization)."""
_LOSSLESS = frozenset({"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split"})
"""Pre-tokenizers that only divide the text, unless they remove what they find."""
_BYTE_TOKENS = frozenset(f"<0x{byte:02X}>" for byte in range(0x100))


class TokenReach(msgspec.Struct, frozen=True):
    """Bounds from above of the characters that one token stands for."""

    ascii: int
    other: int
    """In a text that is not ASCII."""
    dropped: str = ""
    """Characters that become no token."""

    def least_tokens(self, text: str) -> int:
        """A number of tokens that no tokenization of `text` goes below."""
        kept = len(text) - sum(map(text.count, self.dropped))
        return -(-kept // (self.ascii if text.isascii() else self.other))


class _Model(msgspec.Struct):
    type: str = ""
    vocab: Any = None
    byte_fallback: bool = False


class _AddedToken(msgspec.Struct):
    content: str
    lstrip: bool = False
    rstrip: bool = False


class _File(msgspec.Struct):
    model: _Model
    added_tokens: list[_AddedToken] = []
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None


def token_reach(content: str, bytes_of: Mapping[str, int]) -> TokenReach | None:
    """None for a tokenizer that may lose text, or whose steps are not known here: its tokens have no such bound.

    `bytes_of`: the bytes that characters of byte-level vocabularies stand for.
    """
    try:
        file = msgspec.json.decode(content, type=_File)
    except msgspec.ValidationError:
        return None
    composition, dropped = _composition(file.normalizer), _dropped(file, bytes_of)
    if composition is None or dropped is None:
        return None
    added = [unicodedata.normalize("NFD", token.content) for token in file.added_tokens]
    longest = max(map(len, (*file.model.vocab, *added)))
    return TokenReach(longest, longest * composition, dropped)


def _dropped(file: _File, bytes_of: Mapping[str, int]) -> str | None:
    """The control characters that are part of no token; None if other characters may be lost too."""
    steps = list(_steps(file.pre_tokenizer, "pretokenizers"))
    if any(step.get("type") not in _LOSSLESS or step.get("behavior") == "Removed" for step in steps):
        return None
    # Such tokens take any amount of whitespace beside them.
    if any(token.lstrip or token.rstrip for token in file.added_tokens):
        return None
    vocabulary = file.model.vocab
    if file.model.type != "BPE" or not isinstance(vocabulary, Mapping):
        return None
    if any(step.get("type") == "ByteLevel" for step in steps):
        missing = {byte for character, byte in bytes_of.items() if character not in vocabulary}
        # Each character beyond ASCII has one of the latter bytes at least.
        required = {*range(0x20, 0x7F), *range(0x80, 0xC0)}
        return None if missing & required else "".join(chr(byte) for byte in missing if byte < 0x80)
    # Without these an unknown character is dropped, or joined with its neighbours to one token.
    return "" if file.model.byte_fallback and vocabulary.keys() >= _BYTE_TOKENS else None


def _composition(normalizer: Mapping[str, Any] | None) -> int | None:
    """By how much the steps shorten a text at most; None if that is not known."""
    factor = 1
    for step in _steps(normalizer, "normalizers"):
        match step:
            case {"type": "NFC"}:
                factor = _COMPOSITION
            case {"type": "Prepend"}:
                pass
            case {"type": "Replace", "pattern": {"String": str(before)}, "content": str(after)} if (
                0 < len(before) <= len(after)
            ):
                pass
            case _:
                return None
    return factor


def _steps(step: Mapping[str, Any] | None, members: str) -> Iterable[Mapping[str, Any]]:
    """A step, or the steps of a sequence of them."""
    if step is None:
        return
    if step.get("type") != "Sequence":
        yield step
        return
    for each in step.get(members, ()):
        yield from _steps(each, members)
