"""A GGUF file's vocabulary to tokenizer.json and tokenizer_config.json. Knows no tensors.

Byte-level BPE (`gpt2`) with the pre-tokenizers that llama.cpp names, and SentencePiece's BPE (`llama`).
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from orchestrator.machine.gguf.container import GgufFile
from protocol.errors import InputError

_BLANK = "\N{LOWER ONE EIGHTH BLOCK}"
"""How SentencePiece writes a blank."""
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
"""Types of tokens."""
_CASELESS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CASELESS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CASELESS}|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{{0}}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{{0}}"
_O200K = rf"{_WORDS.replace('{0}', _SUFFIX)}|\p{{N}}{{1,3}}|{_O200K_REST}"
_TEKKEN = rf"{_WORDS.replace('{0}', '')}|\p{{N}}|{_O200K_REST}"


def _by(pattern: str) -> Callable[[], Any]:
    """Split by a regular expression, then byte by byte."""
    return lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_then_gpt2() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


_PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "jais"), _gpt2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), _digits_then_gpt2),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _by(_LLAMA3)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2"), _by(_QWEN2)),
    **dict.fromkeys(("gpt-4o", "llama4"), _by(_O200K)),
    "tekken": _by(_TEKKEN),
}
"""By llama.cpp's name of the kind, with its regular expressions."""
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "tekken", "gpt-4o", "llama4")
"""Kinds in which a word of the vocabulary is a token, whatever the merges say."""
_COMPOSED = ("qwen2", "deepseek-r1-qwen")
"""Kinds whose text is in Unicode's NFC."""
_BOS_BY_DEFAULT = ("llama-bpe", "llama3", "llama-v3", "llama4", "tekken")


def write_tokenizer(file: GgufFile, folder: Path) -> None:
    """Writes both files into `folder`. Raises InputError for a vocabulary that is not known here, or is broken."""
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    kind = file.metadata.get("tokenizer.ggml.model")
    if not isinstance(tokens, list) or kind not in ("gpt2", "llama"):
        raise InputError(
            f"{file.path} has a tokenizer of the kind {kind!r}, which can't be read: pass the model in mlx-lm's format."
        )
    try:
        tokenizer = (_byte_level if kind == "gpt2" else _sentence_piece)(file, tokens)
        _add_tokens(tokenizer, file, tokens)
        _add_ends(tokenizer, file, tokens)
        tokenizer.save(str(folder / "tokenizer.json"))
    except (InputError, OSError):
        raise
    # What the library raises of itself is a plain Exception.
    except Exception as error:
        raise InputError(f"The tokenizer in {file.path} is broken ({error}): download the file again.") from error
    (folder / "tokenizer_config.json").write_text(json.dumps(_settings(file, tokens)), encoding="utf-8")


def end_tokens(file: GgufFile) -> list[int]:
    """Ids after which a text or a turn is over."""
    named = (file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return list(dict.fromkeys(id for id in named if isinstance(id, int)))


def token_id(file: GgufFile, name: str) -> int | None:
    """The id of the special token `name`, for instance bos."""
    id = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
    return id if isinstance(id, int) else None


def _byte_level(file: GgufFile, tokens: list[str]) -> Tokenizer:
    kind = _kind(file)
    if kind not in _PRE_TOKENIZERS:
        raise InputError(
            f"The tokenizer in {file.path} splits text in a way that is not known here ({kind!r}): pass the model in "
            "mlx-lm's format."
        )
    merges = [
        (left, right)
        for left, _, right in (merge.partition(" ") for merge in file.metadata.get("tokenizer.ggml.merges", []))
    ]
    vocabulary = {token: id for id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=kind in _WHOLE_WORDS))
    if kind in _COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[kind]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(file: GgufFile, tokens: list[str]) -> Tokenizer:
    vocabulary = {token: id for id, token in enumerate(tokens)}
    unknown = token_id(file, "unknown")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges(vocabulary, file.metadata["tokenizer.ggml.scores"]),
            unk_token=tokens[unknown] if unknown is not None else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefixed = file.metadata.get("tokenizer.ggml.add_space_prefix", True)
    replace = normalizers.Replace(" ", _BLANK)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_BLANK), replace] if prefixed else [replace])
    steps: list[Any] = [decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps)
    return tokenizer


def _merges(vocabulary: dict[str, int], scores: Any) -> list[tuple[str, str]]:
    """SentencePiece merges the neighbours whose union has the highest score; here as a list in that order."""
    found = [
        (scores[id], token[:place], token[place:])
        for token, id in vocabulary.items()
        for place in range(1, len(token))
        if token[:place] in vocabulary and token[place:] in vocabulary
    ]
    found.sort(key=lambda each: (-each[0], vocabulary[each[1]], vocabulary[each[2]]))
    return [(left, right) for _, left, right in found]


def _kind(file: GgufFile) -> str:
    return str(file.metadata.get("tokenizer.ggml.pre", "not told"))


def _add_tokens(tokenizer: Tokenizer, file: GgufFile, tokens: list[str]) -> None:
    """Control tokens, which make no text, and others that are found before a text is split."""
    types = file.metadata.get("tokenizer.ggml.token_type")
    named = [] if types is None else list(zip(tokens, types, strict=True))
    special = [text for text, type in named if type in (_CONTROL, _UNKNOWN)]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    plain = [text for text, type in named if type == _USER_DEFINED]
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in plain])


def _add_ends(tokenizer: Tokenizer, file: GgufFile, tokens: list[str]) -> None:
    """The tokens that begin and end a text, if the model was trained with them."""
    sentence_piece = file.metadata["tokenizer.ggml.model"] == "llama"
    defaults = {"bos": sentence_piece or _kind(file) in _BOS_BY_DEFAULT, "eos": False}
    used = {
        name: tokens[id]
        for name, default in defaults.items()
        if file.metadata.get(f"tokenizer.ggml.add_{name}_token", default) and (id := token_id(file, name)) is not None
    }
    if used:
        pieces = [*([used["bos"]] if "bos" in used else []), "$A", *([used["eos"]] if "eos" in used else [])]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=pieces, special_tokens=[(text, tokens.index(text)) for text in dict.fromkeys(used.values())]
        )


def _settings(file: GgufFile, tokens: list[str]) -> dict[str, Any]:
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: token_id(file, short) for name, short in names.items()}
    template = file.metadata.get("tokenizer.chat_template")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{name: tokens[id] for name, id in ids.items() if id is not None and id < len(tokens)},
        **({"chat_template": template} if isinstance(template, str) else {}),
    }
