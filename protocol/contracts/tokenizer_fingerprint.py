"""Hashes of a tokenizer's ids and their texts, and where two tokenizers differ. Knows the form of tokenizer.json, and
no model."""

import hashlib
from itertools import zip_longest
from pathlib import Path

import msgspec

from protocol.errors import InputError

_MOST_BYTES = 128 << 20
"""The largest known ones have about 35 MB (Gemma 3)."""
_LONGEST = 40
"""Characters of a token in a sentence."""


def tokenizer_fingerprint(folder: Path) -> str:
    """SHA-256 (64 hex digits) over every token's id and text and over the merges of `folder`/tokenizer.json.

    Not included is what changes no id: padded rows of a model's vocabulary, the order of entries, the spelling of
    merges ("a b" or ["a", "b"]), and whether a special token stands in the vocabulary or only among the added tokens.

    Raises InputError if the file is missing or is not a tokenizer.
    """
    tokenizer = _read(folder)
    return _hash(_ids(tokenizer), tokenizer)


def vocabulary_fingerprint(folder: Path) -> str:
    """The same over the tokens into which plain text is divided: equal for a draft and a target that divide it alike.

    Added tokens are left out, since models of one family differ in them (Qwen2.5 and Qwen3, Gemma 3 in two sizes). An
    added token that one of them lacks costs a wrong guess at most, and a wrong guess changes no token.
    """
    tokenizer = _read(folder)
    return _hash(_plain_ids(tokenizer), tokenizer)


def first_difference(target: Path, draft: Path) -> str | None:
    """Where a draft's tokenizer first divides text otherwise than the target's, as a clause; None if nowhere.

    Raises InputError as `tokenizer_fingerprint` does.
    """
    ours, theirs = _read(target), _read(draft)
    texts, others = ({id: text for text, id in _plain_ids(each).items()} for each in (ours, theirs))
    for id in sorted(texts.keys() | others.keys()):
        if texts.get(id) != others.get(id):
            return f"token {id} is {_named(texts.get(id))} in the target and {_named(others.get(id))} in the draft"
    for number, (merge, other) in enumerate(zip_longest(_merges(ours), _merges(theirs))):
        if merge != other:
            return f"merge {number} is {_named(merge)} in the target and {_named(other)} in the draft"
    return None


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]]
    """BPE, WordPiece and WordLevel map text to id; Unigram lists (text, score) in the order of ids."""
    merges: list[str | tuple[str, str]] | None = None


class _Tokenizer(msgspec.Struct):
    model: _Model
    added_tokens: list[_AddedToken] = []


def tokenizer_file(folder: Path) -> bytes:
    """`folder`/tokenizer.json. Raises InputError without it, and for one that is larger than any model's."""
    file = folder / "tokenizer.json"
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise InputError(
                f"{file} has over {_MOST_BYTES >> 20} MiB, several times as many as any known model's, and would take "
                "gigabytes of memory: choose another model."
            )
        return file.read_bytes()
    except OSError as error:
        raise InputError(
            f"{folder} has no readable tokenizer.json ({error.strerror}): "
            "pass the folder of a complete model, with config.json, tokenizer.json and safetensors."
        ) from error


def _read(folder: Path) -> _Tokenizer:
    try:
        return msgspec.json.decode(tokenizer_file(folder), type=_Tokenizer)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{folder}/tokenizer.json is broken ({error}): download the model again.") from error


def _hash(ids: dict[str, int], tokenizer: _Tokenizer) -> str:
    content = [sorted(ids.items()), _merges(tokenizer)]
    return hashlib.sha256(msgspec.json.encode(content)).hexdigest()


def _merges(tokenizer: _Tokenizer) -> list[list[str]]:
    merges = tokenizer.model.merges or ()
    return [merge.split(" ", 1) if isinstance(merge, str) else list(merge) for merge in merges]


def _plain_ids(tokenizer: _Tokenizer) -> dict[str, int]:
    added = {token.content for token in tokenizer.added_tokens}
    return {text: id for text, id in _ids(tokenizer).items() if text not in added}


def _named(part: str | list[str] | None) -> str:
    """A token or a merge in a sentence, short and without control characters."""
    return "absent" if part is None else ascii("+".join(part) if isinstance(part, list) else part)[:_LONGEST]


def _ids(tokenizer: _Tokenizer) -> dict[str, int]:
    vocabulary = tokenizer.model.vocab
    if isinstance(vocabulary, list):
        vocabulary = {text: id for id, (text, _score) in enumerate(vocabulary)}
    return vocabulary | {token.content: token.id for token in tokenizer.added_tokens}
