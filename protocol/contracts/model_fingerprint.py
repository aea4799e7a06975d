"""A hash of a model's weights that is cheap to compute. Knows the beginning of safetensors files."""

import hashlib
from collections.abc import Callable
from pathlib import Path

from protocol.contracts.head_tokens import HEAD_TOKENS
from protocol.errors import InputError

_SAMPLES = 16
_SAMPLE_BYTES = 4096
_MOST_HEADER = 100 << 20
"""As in the safetensors library."""


def model_fingerprint(folder: Path) -> str:
    """SHA-256 (64 hex digits) over config.json, the head's tokens, and every weight file's name, size, header, samples.

    The header of a safetensors file is an 8-byte length and JSON with every tensor's name, type, shape and place.
    Evenly spaced samples distinguish models whose files differ in nothing else, such as fine-tunes.
    Raises InputError if the folder can't be read.
    """
    digest = hashlib.sha256()
    try:
        digest.update((folder / "config.json").read_bytes())
        if (folder / HEAD_TOKENS).exists():
            digest.update((folder / HEAD_TOKENS).read_bytes())
        for path in sorted(folder.glob("*.safetensors")):
            digest.update(f"\0{path.name}\0{path.stat().st_size}\0".encode())
            _add_weights(digest.update, path)
    except OSError as error:
        raise InputError(
            f"{folder} can't be read ({error.strerror}): name a folder with config.json and model*.safetensors."
        ) from error
    return digest.hexdigest()


def _add_weights(add: Callable[[bytes], object], path: Path) -> None:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        add(file.read(min(length, _MOST_HEADER)))
        begin, end = file.tell(), path.stat().st_size
        for sample in range(_SAMPLES):
            file.seek(begin + max(0, end - begin - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
            add(file.read(_SAMPLE_BYTES))
