"""A GGUF file to a folder in mlx-lm's format, kept in this user's cache folder."""

import json
import math
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from orchestrator.machine.cache_entries import made_once
from orchestrator.machine.gguf.architectures import model_config, row_order, tensor_name
from orchestrator.machine.gguf.container import GgufFile, read_gguf
from orchestrator.machine.gguf.tokenizer import end_tokens, token_id, write_tokenizer
from orchestrator.machine.gguf.weights import GROUP, Part, common_format, packed_bits, parts
from orchestrator.machine.progress import OnProgress, silent
from protocol.contracts.coreml.conversion import Progress
from protocol.errors import InputError
from protocol.paths import cache_folder

_SIZES = {"U32": 4, "F32": 4, "F16": 2, "BF16": 2}
_ALIGNMENT = 8


def write_safetensors(file: Path, parts: Sequence[Part], on_bytes: Callable[[int, int], None]) -> None:
    """`on_bytes` gets how many bytes of how many are written. Raises OSError if they can't be."""
    entries: dict[str, object] = {"__metadata__": {"format": "mlx"}}
    total = 0
    for part in parts:
        size = math.prod(part.shape) * _SIZES[part.format]
        entries[part.name] = {"dtype": part.format, "shape": part.shape, "data_offsets": (total, total + size)}
        total += size
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % _ALIGNMENT)
    written = 0
    with file.open("wb") as out:
        out.write(len(header).to_bytes(8, "little") + header)
        for part in parts:
            for chunk in part.chunks():
                out.write(chunk.data)
                written += chunk.nbytes
                on_bytes(written, total)
    assert written == total, f"{written} bytes instead of {total}"


_FORMAT = 2
"""Raised if the same file becomes another folder, so that folders of older versions are not used."""
_MIB = 1 << 20
_SAMPLING = {"temperature": "temp", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"}
"""Hugging Face's names of sampling values, and GGUF's behind `general.sampling.`."""


def gguf_folder(file: Path, on_progress: OnProgress = silent) -> Path:
    """The folder of the model in `file`, made on first use. Raises InputError for a file that can't be converted.

    A file that changes is converted again.
    """
    return made_once(gguf_place(file), lambda folder: convert_gguf(file, folder, on_progress))


def gguf_place(file: Path) -> Path:
    """Where the folder of the model in `file` is, once it was made. Raises InputError for a file that is not there."""
    try:
        facts = file.stat()
    except OSError as error:
        raise InputError(f"{file} can't be read ({error.strerror}): check the file.") from error
    key = sha256(f"{_FORMAT} {file.resolve()} {facts.st_size} {facts.st_mtime_ns}".encode()).hexdigest()[:32]
    return _place(file, key)


def _place(file: Path, key: str) -> Path:
    """The folder has the file's name, except for Ollama's files, which are named by their hash."""
    name = file.stem if file.suffix == ".gguf" else "model"
    return cache_folder() / "gguf" / f"{name}-{key}"


def convert_gguf(path: Path, folder: Path, on_progress: OnProgress = silent) -> None:
    """Fill the empty `folder` with config.json, the tokenizer's files and model.safetensors, and with
    generation_config.json if the file states how to sample.

    Raises InputError for a file that can't be read, OSError if `folder` can't be written.
    """
    file = read_gguf(path)
    _require_whole(file)
    config = model_config(file)
    write_tokenizer(file, folder)
    _write(folder / "config.json", config | _tokens(file) | _quantization(_packed(file)))
    if sampling := _sampling(file):
        _write(folder / "generation_config.json", {"do_sample": True, **sampling})
    stage = f"reading {path.name}"
    write_safetensors(
        folder / "model.safetensors",
        _all_parts(file, config),
        lambda done, total: on_progress(Progress(stage, -(-done // _MIB), -(-total // _MIB))),
    )


def _require_whole(file: GgufFile) -> None:
    if (count := file.metadata.get("split.count", 1)) != 1:
        raise InputError(f"{file.path} is one of {count} parts: join them first with `llama-gguf-split --merge`.")


def _all_parts(file: GgufFile, config: dict[str, Any]) -> list[Part]:
    format = common_format(list(file.tensors.values()))
    found: list[Part] = []
    for tensor in file.tensors.values():
        name = tensor_name(file, tensor.name)
        if name is not None:
            found += parts(tensor, name, format, row_order(config, tensor.name))
    return found


def _packed(file: GgufFile) -> dict[str, int]:
    """Bits of the packed layers by mlx-lm's names."""
    named = ((tensor_name(file, tensor.name), packed_bits(tensor)) for tensor in file.tensors.values())
    return {name.removesuffix(".weight"): bits for name, bits in named if name is not None and bits is not None}


def _quantization(bits: dict[str, int]) -> dict[str, Any]:
    """The most frequent bits for the model, and an entry for each layer of others."""
    if not bits:
        return {}
    found = list(bits.values())
    common = max(set(found), key=found.count)
    others = {name: {"group_size": GROUP, "bits": each} for name, each in bits.items() if each != common}
    quantization = {"group_size": GROUP, "bits": common, **others}
    return {"quantization": quantization, "quantization_config": quantization}


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
