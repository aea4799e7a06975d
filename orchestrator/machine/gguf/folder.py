"""A GGUF file to a folder in mlx-lm's format, kept in this user's cache folder.

Its vocabulary becomes tokenizer.json and tokenizer_config.json:
byte-level BPE (`gpt2`) with the pre-tokenizers that llama.cpp names, and SentencePiece's BPE (`llama`).
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from orchestrator.machine.cache_entries import made_once
from orchestrator.machine.gguf import CONVERSION, Again, Conversion, part_names
from orchestrator.machine.gguf.architectures import (
    arrays_of,
    model_config,
)
from orchestrator.machine.gguf.container import GgufFile, read_gguf
from orchestrator.machine.gguf.weights import Packed, Stored, common_format, stored, write_safetensors
from protocol.contracts.coreml import OnProgress, Progress, silent
from protocol.contracts.model_folder import PROCESSOR_BYTES
from protocol.errors import InputError
from protocol.paths import cache_folder

_BLANK = "\N{LOWER ONE EIGHTH BLOCK}"
"""How SentencePiece writes a blank."""
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
"""Types of tokens."""
_CASELESS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CASELESS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CASELESS}|\p{{N}}|{_REST}"
_QWEN35 = _QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
_DEEPSEEK_LLM = (
    r"[\r\n]",
    r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}",
)
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{{0}}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{{0}}"
_O200K = rf"{_WORDS.replace('{0}', _SUFFIX)}|\p{{N}}{{1,3}}|{_O200K_REST}"
_TEKKEN = rf"{_WORDS.replace('{0}', '')}|\p{{N}}|{_O200K_REST}"


def _by(*patterns: str) -> Callable[[], Any]:
    """Split by regular expressions, one after the other, then byte by byte."""
    return lambda: pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns),
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
    **dict.fromkeys(("lfm2", "falcon3", "pixtral"), _by(_LLAMA3)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2"), _by(_QWEN2)),
    **dict.fromkeys(("gpt-4o", "llama4"), _by(_O200K)),
    "qwen35": _by(_QWEN35),
    **dict.fromkeys(
        ("deepseek-v3", "deepseek-r1"), _by(r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK3)
    ),
    "deepseek-llm": _by(*_DEEPSEEK_LLM),
    "tekken": _by(_TEKKEN),
}
"""By llama.cpp's name of the kind, with its regular expressions."""
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "lfm2", "falcon3", "pixtral", "tekken", "gpt-4o", "llama4")
"""Kinds in which a word of the vocabulary is a token, whatever the merges say."""
_COMPOSED = ("qwen2", "qwen35", "deepseek-r1-qwen")
"""Kinds whose text is in Unicode's NFC."""
_BOS_BY_DEFAULT = ("llama-bpe", "llama3", "llama-v3", "lfm2", "falcon3", "pixtral", "llama4", "tekken")
_KINDS = {
    **dict.fromkeys(("qwen2", "qwen3", "qwen3moe"), "qwen2"),
    **dict.fromkeys(("glm4", "glm4moe"), "glm4"),
    **dict.fromkeys(("qwen35", "qwen35moe"), "qwen35"),
    **{"gpt-oss": "gpt-4o", "lfm2": "lfm2", "lfm2moe": "lfm2", "qwen3next": "qwen2"},
}
"""The kind of an architecture's tokenizer in a file that does not state it. Others have several kinds."""


def write_tokenizer(file: GgufFile, folder: Path) -> None:
    """Writes both files into `folder`. Raises InputError for a vocabulary that is not known here."""
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    kind = file.metadata.get("tokenizer.ggml.model")
    if not isinstance(tokens, list) or str(kind) not in ("gpt2", "llama", "gemma4"):
        raise InputError(
            f"{file.path} has a tokenizer of the kind {kind!r}, which can't be read: pass the model in mlx-lm's format."
        )
    tokenizer = (_byte_level if kind == "gpt2" else _sentence_piece)(file, tokens)
    _add_tokens(tokenizer, file, tokens)
    _add_ends(tokenizer, file, tokens)
    tokenizer.save(str(folder / "tokenizer.json"))
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
    merges = _listed_merges(file)
    vocabulary = {token: id for id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=kind in _WHOLE_WORDS))
    if kind in _COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[kind]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _listed_merges(file: GgufFile) -> list[tuple[str, str]]:
    found = (merge.partition(" ") for merge in file.metadata.get("tokenizer.ggml.merges", []))
    return [(left, right) for left, _, right in found]


def _sentence_piece(file: GgufFile, tokens: list[str]) -> Tokenizer:
    vocabulary = {token: id for id, token in enumerate(tokens)}
    unknown = token_id(file, "unknown")
    listed = file.metadata["tokenizer.ggml.model"] == "gemma4"
    merges = _listed_merges(file) if listed else _merges(vocabulary, file.metadata["tokenizer.ggml.scores"])
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=merges,
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
    default = _KINDS.get(str(file.metadata.get("general.architecture")), "not told")
    return str(file.metadata.get("tokenizer.ggml.pre", default))


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
    sentence_piece = file.metadata["tokenizer.ggml.model"] != "gpt2"
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
    key = "tokenizer.chat_template"
    named = {name.removeprefix(f"{key}."): each for name, each in file.metadata.items() if name.startswith(f"{key}.")}
    template: Any = file.metadata.get(key)
    if isinstance(template, str) and named:
        named = {"default": template, **named}
        template = [{"name": name, "template": each} for name, each in named.items() if isinstance(each, str)]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{name: tokens[id] for name, id in ids.items() if id is not None and id < len(tokens)},
        **({"chat_template": template} if isinstance(template, str | list) else {}),
    }


_FORMAT = 6
"""Raised if the same file becomes another folder, so that folders of older versions are not used."""
_MIB = 1 << 20
_SAMPLES, _SAMPLE_BYTES = 16, 4096
_SAMPLING = {"temperature": "temp", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"}
"""Hugging Face's names of sampling values, and GGUF's behind `general.sampling.`."""


def gguf_folder(file: Path, on_progress: OnProgress = silent) -> Path:
    """The folder of the model in `file`, made on first use. Raises InputError for a file that can't be converted.

    A file that changes is converted again.
    """
    place = gguf_place(file)

    def convert(folder: Path) -> None:
        convert_gguf(file, folder, on_progress)
        if gguf_place(file) != place:
            raise InputError(f"{file} changed while it was read: start again when it is complete.")

    return made_once(place, convert)


def gguf_place(file: Path) -> Path:
    """Where the folder of the model in `file` is, once it was made. Raises InputError for a file that is not there.

    A file that was moved keeps its folder. One in its place has another, by its content's samples too: files of an
    archive may have the same size and time.
    """
    # A pipe would keep whoever opens it waiting for ever.
    if file.exists() and not file.is_file():
        raise InputError(f"{file} is not a regular file: download it again.")
    key = sha256(b"%d" % _FORMAT)
    try:
        for part in sorted([file, *filter(Path.is_file, _parts_of(file))]):
            facts = part.stat()
            key.update(f" {facts.st_size} {facts.st_mtime_ns}".encode())
            with part.open("rb") as opened:
                for place in range(_SAMPLES):
                    opened.seek(max(0, facts.st_size - _SAMPLE_BYTES) * place // (_SAMPLES - 1))
                    key.update(opened.read(_SAMPLE_BYTES))
    except OSError as error:
        raise InputError(f"{file} can't be read ({error.strerror}): check the file.") from error
    # The folder has the file's name, except for Ollama's files, which are named by their hash.
    name = Path(part_names(file.name)[0]).stem if file.suffix == ".gguf" else "model"
    return cache_folder() / "gguf" / f"{name}-{key.hexdigest()[:32]}"


def _parts_of(file: Path) -> list[Path]:
    """Other files of the same model."""
    return [file.with_name(name) for name in part_names(file.name) if name != file.name]


def convert_gguf(path: Path, folder: Path, on_progress: OnProgress = silent) -> None:
    """Fill the empty `folder` with config.json, the tokenizer's files and model.safetensors, with
    generation_config.json if the file states how to sample, and with a `Conversion`.

    Raises InputError for a file that can't be read, OSError if `folder` can't be written.
    """
    with _legible(path):
        _fill(read_gguf(path), folder, on_progress)


def planned(path: Path) -> tuple[Conversion, int]:
    """What the file becomes, and the bytes that its weights take on a processor at least: packed, with scales of 32
    bits. Raises InputError for a file that can't be read."""
    with _legible(path):
        file = read_gguf(path)
        content = _content(file, model_config(file))
        elements = sum(part.elements for each in content for part in each.parts)
        return _conversion(file, content, {}), PROCESSOR_BYTES * elements


@contextmanager
def _legible(path: Path) -> Iterator[None]:
    try:
        yield
    except (InputError, OSError):
        raise
    except Exception as error:
        # What a file states may contradict itself anywhere, and `tokenizers` raises plain Exceptions.
        raise InputError(f"{path} is broken ({str(error) or type(error).__name__}): download another file.") from error


def _fill(file: GgufFile, folder: Path, on_progress: OnProgress) -> None:
    config = model_config(file)
    content = _content(file, config)
    write_tokenizer(file, folder)
    _write(folder / "config.json", config | _tokens(file) | _quantization(content))
    if sampling := _sampling(file):
        _write(folder / "generation_config.json", {"do_sample": True, **sampling})
    stage = f"converting {_conversion(file, content, {}).text}"
    off = write_safetensors(
        folder / "model.safetensors",
        content,
        lambda done, total: on_progress(Progress(stage, -(-done // _MIB), -(-total // _MIB))),
    )
    _write(folder / CONVERSION, msgspec.to_builtins(_conversion(file, content, off)))


def _conversion(file: GgufFile, content: Sequence[Stored], off: Mapping[str, float]) -> Conversion:
    again: dict[str, Again] = {}
    for each in content:
        if each.packed is not None and each.again:
            kind = each.kind.name
            before = again[kind].bytes if kind in again else 0
            again[kind] = Again(before + each.size, each.packed.bits, off.get(kind, 0.0))
    size = sum(part.stat().st_size for part in (file.path, *_parts_of(file.path)))
    return Conversion(file.path.name, size, sum(each.size for each in content), again)


def _content(file: GgufFile, config: dict[str, Any]) -> list[Stored]:
    format = common_format(list(file.tensors.values()))
    return [
        stored(tensor, name, format, laid)
        for tensor in file.tensors.values()
        for name, laid in arrays_of(file, config, tensor).items()
    ]


def _quantization(content: Sequence[Stored]) -> dict[str, Any]:
    """The most frequent packing for the model, and an entry for each layer of another."""
    layers = {each.parts[0].name.removesuffix(".weight"): each.packed for each in content if each.packed is not None}
    if not layers:
        return {}
    found = list(layers.values())
    common = max(set(found), key=found.count)
    others = {name: _stated(each) for name, each in layers.items() if each != common}
    quantization = {**_stated(common), **others}
    return {"quantization": quantization, "quantization_config": quantization}


def _stated(how: Packed) -> dict[str, Any]:
    mode = {} if how.mode == "affine" else {"mode": how.mode}
    return {"group_size": how.group, "bits": how.bits, **mode}


def _tokens(file: GgufFile) -> dict[str, Any]:
    ids = {"bos_token_id": token_id(file, "bos"), "pad_token_id": token_id(file, "padding")}
    return {"eos_token_id": end_tokens(file), **{name: id for name, id in ids.items() if id is not None}}


def _sampling(file: GgufFile) -> dict[str, float]:
    keys = {name: f"general.sampling.{key}" for name, key in _SAMPLING.items()}
    found = {name: file.metadata[key] for name, key in keys.items() if key in file.metadata}
    # The file has 32 bits: 0.7 is 0.699999988 there.
    return {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in found.items()}


def _write(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=1), encoding="utf-8")
