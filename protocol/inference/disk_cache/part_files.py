"""The files of the disk cache: their names, and parts as checked bytes. Knows no sequences."""

import hashlib
import io
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import xxhash

from protocol.errors import PipelineError
from protocol.inference.disk_cache.snapshot import Part

_MAGIC = b"LPKVPART"
_FORMAT = 1
_DIGEST_BYTES = 16


class PartDamaged(PipelineError):
    """A file is not used; the tokens have to be prefilled."""


def parts_name(fingerprint: str, device: str) -> str:
    """Of all that decides which bytes the KV of given tokens has: 32 hexadecimal digits.

    `fingerprint`: of the weights and the form of KV. Another device, or version of MLX, rounds otherwise.
    """
    return hashlib.sha256(f"parts {_FORMAT} {fingerprint} {version('mlx')} {device}".encode()).hexdigest()[:32]


def prefix_names(name: str, tokens: Sequence[int], places: Iterable[int]) -> dict[int, str]:
    """For ascending `places`: names of the first so many tokens. Each names all of them, and the model, by `name`."""
    hashed, begin, found = hashlib.sha256(name.encode()), 0, {}
    for place in places:
        hashed.update(np.array(tokens[begin:place], "<u4").tobytes())
        begin, found[place] = place, hashed.hexdigest()[:40]
    return found


def encoded(part: Part) -> bytes:
    """In the format of safetensors, computed now."""
    buffer = io.BytesIO()
    save: Any = mx.save_safetensors
    save(buffer, part.arrays, {"plain": msgspec.json.encode(part.plain).decode()})
    return buffer.getvalue()


def sealed(name: str, content: bytes) -> bytes:
    """With a checksum over it and the file's name."""
    return _MAGIC + _digest(name, content) + content


def checked(name: str, sealed: bytes) -> bytes:
    """The inverse of `sealed`. Raises PartDamaged."""
    begin = len(_MAGIC) + _DIGEST_BYTES
    content = sealed[begin:]
    if sealed[:begin] != _MAGIC + _digest(name, content):
        raise PartDamaged("it is torn, or of another model (its checksum is wrong).")
    return content


def decoded(content: bytes) -> Part:
    """The inverse of `encoded`."""
    load: Any = mx.load
    arrays, metadata = load(io.BytesIO(content), format="safetensors", return_metadata=True)
    mx.eval(arrays)
    return Part(arrays, msgspec.json.decode(metadata["plain"]))


def _digest(name: str, content: bytes) -> bytes:
    return xxhash.xxh3_128(content, seed=xxhash.xxh3_64_intdigest(name.encode())).digest()
