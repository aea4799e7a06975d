"""Text that looks like control tokens of a model and is text all the same: what users, tools and pages wrote.

A break behind the first character of such a text goes through the chat template with it. It tells the text from the
tokens that the template wrote. Templates trim, split, join and compare contents; the break changes nothing else there.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import chain
from secrets import token_hex
from typing import Any

from tokenizers import AddedToken, Tokenizer

from protocol.errors import InputError

BREAK = "\N{CORNISH VERSE DIVIDER}"
"""No token goes over it. Two of them are one that is text. Rare, and printable, so that templates do not escape it."""
_BREAKS = f"{BREAK}({BREAK})?"
_LONGEST = 100
"""Characters of a control token."""
_WORD = re.compile(r"\w*|\s*")


def controls(text: str) -> bool:
    """Whether an added token with this text can control a model. Tokenizers add words and runs of spaces too."""
    return 1 < len(text) <= _LONGEST and _WORD.fullmatch(text) is None


def with_breaks(value: Any, tokens: frozenset[str]) -> Any:
    """`value`, of JSON's types, with a break in each text in it that is one of `tokens`, or could be the beginning of
    one at its end."""
    if isinstance(value, str):
        return _firsts(tokens).sub(lambda first: first[0] + BREAK, value)
    if isinstance(value, Mapping):
        return {with_breaks(name, tokens): with_breaks(each, tokens) for name, each in value.items()}
    return [with_breaks(each, tokens) for each in value] if isinstance(value, list | tuple) else value


def encoded(tokenizer: Tokenizer, text: str, special: bool = False) -> list[int]:
    """Raises InputError for a text that a pattern of the tokenizer can't be matched with."""
    try:
        # The form for one text holds the interpreter's lock until it is done, this one does not.
        return tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids
    except BaseException as error:
        # The library's own, which is no Exception: a pattern took more steps than its matcher allows.
        if type(error).__name__ != "PanicException":
            raise
        raise InputError(f"The model's tokenizer can't read this text ({error}): change the text.") from error


@lru_cache(maxsize=16)
def _firsts(tokens: frozenset[str]) -> re.Pattern[str]:
    """Matches the first character of each of `tokens`, and a break."""
    begun = {re.escape(first): _any_of(rests, end=r"\Z") for first, rests in _by_first(tokens).items()}
    return re.compile("|".join((BREAK, *(f"{first}(?={rest})" for first, rest in begun.items()))))


def _any_of(texts: Collection[str], end: str = "") -> str:
    """A pattern of the longest of `texts`; also of a beginning of them that `end` follows."""
    begun = [re.escape(first) + _any_of(rests, end) for first, rests in _by_first(texts).items()]
    options = [*begun, end] if begun and end else begun
    whole = "" in texts
    return "|".join(options) if len(options) < 2 and not whole else f"(?:{'|'.join(options)}){'?' * whole}"


def _by_first(texts: Collection[str]) -> dict[str, set[str]]:
    """What follows each first character."""
    found: dict[str, set[str]] = {}
    for text in filter(None, sorted(texts)):
        found.setdefault(text[0], set()).add(text[1:])
    return found


class PlainTextTokenizer:
    """Encodes a text with breaks. Added tokens have names there that nobody can guess, so they are only where this
    class puts the names: where no break is in them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._own = own = Tokenizer(tokenizer.model)
        own.normalizer, own.pre_tokenizer = tokenizer.normalizer, tokenizer.pre_tokenizer
        unknown = {token.id for token in own.model.tokenize("\U0010ffff")}
        key = token_hex(16)
        self._names: dict[str, str] = {}
        self._texts: dict[int, str] = {}
        self._ids: dict[int | None, int] = {}
        for id, added in sorted(tokenizer.get_added_tokens_decoder().items()):
            text = name = added.content
            # The library does not find what its normalizer changes.
            lost = added.normalized and own.normalizer is not None and own.normalizer.normalize_str(text) != text
            if controls(text) and not (lost or added.single_word or id in unknown):
                self._texts[id] = text
                self._names[text] = name = f"<{key}.{id}>"
            flags = {flag: getattr(added, flag) for flag in ("single_word", "lstrip", "rstrip", "normalized")}
            own.add_tokens([AddedToken(name, **flags)])
            self._ids[own.token_to_id(name)] = id
        self._pattern = re.compile(f"{_BREAKS}|{_any_of(self._names)}")

    def encode(self, text: str) -> list[int]:
        named = self._pattern.sub(lambda found: self._names.get(found[0], found[1] or ""), text)
        return [*self._checked(encoded(self._own, named))]

    def _checked(self, ids: Iterable[int]) -> Iterator[int]:
        for id in ids:
            if (text := self._texts.get(id)) and id not in self._ids:
                # Unigram makes these tokens of text too.
                parts = chain(*map(self._own.model.tokenize, (text[:1], text[1:])))
                yield from self._checked(token.id for token in parts)
            else:
                yield self._ids.get(id, id)
