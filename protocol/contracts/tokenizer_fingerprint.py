"""A hash of a tokenizer's ids and their texts. Knows the form of tokenizer.json, and no model."""

import hashlib
from pathlib import Path

import msgspec

from protocol.errors import InputError


def tokenizer_fingerprint(folder: Path) -> str:
    """SHA-256 (64 hex digits) over every token's id and text and over the merges of `folder`/tokenizer.json.

    Equal for a draft and a target whose ids mean the same text. Not included is what does not change that:
    padded rows of a model's vocabulary, the order of entries, the spelling of merges ("a b" or ["a", "b"]),
    and whether a special token stands in the vocabulary or only among the added tokens.

    Raises InputError if the file is missing or is not a tokenizer.
    """
    tokenizer = _read(folder)
    ids = dict(sorted(_ids(tokenizer).items()))
    merges = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in tokenizer.model.merges or ()]
    return hashlib.sha256(msgspec.json.encode([list(ids.items()), merges])).hexdigest()


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


def _read(folder: Path) -> _Tokenizer:
    try:
        return msgspec.json.decode((folder / "tokenizer.json").read_bytes(), type=_Tokenizer)
    except OSError as error:
        raise InputError(
            f"{folder} has no readable tokenizer.json ({error.strerror}): "
            "pass the folder of a complete model, with config.json, tokenizer.json and safetensors."
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{folder}/tokenizer.json is broken ({error}): download the model again.") from error


def _ids(tokenizer: _Tokenizer) -> dict[str, int]:
    vocabulary = tokenizer.model.vocab
    if isinstance(vocabulary, list):
        vocabulary = {text: id for id, (text, _score) in enumerate(vocabulary)}
    return vocabulary | {token.content: token.id for token in tokenizer.added_tokens}
