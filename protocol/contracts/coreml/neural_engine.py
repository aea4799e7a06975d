"""The outcome of an examination of this machine's Neural Engine with a converted model, and the file that records it.

Knows no Core ML: one process examines, another reads the outcome.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from protocol.contracts.coreml.conversion import FOLDER_MODEL
from protocol.errors import InputError
from protocol.paths import cache_folder
from protocol.security.private_files import write_private

EngineChoice: TypeAlias = Literal["coreml", "mlx"]
"""The engine that a draft should use here."""
_SAMPLES = 64
_SAMPLE_BYTES = 1 << 16


class ExaminedSystem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The system and the model that an examination holds for. After an update of either, a new one is needed."""

    system: str
    """The build of the operating system."""
    chip: str
    package: str
    """`package_fingerprint` of a converted model; of a trial or a refused conversion the key of the conversion."""
    target: str = ""
    """`model_fingerprint` of the target beside which engines were compared; empty if the device alone was examined."""


class EngineRates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tokens a second beside one target, measured or inferred in a trial."""

    coreml: float
    mlx: float


class EngineVerdict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The outcome of an examination, or of a trial beside a target."""

    place: ExaminedSystem
    choice: EngineChoice
    reason: str
    """One sentence without a full stop."""
    rates: EngineRates | None = None
    """Of a trial."""
    model: str = ""
    """Name of the draft, for the user."""


def package_fingerprint(folder: Path) -> str:
    """SHA-256 (64 hex digits) over a converted model: names, sizes and, of big files, evenly spaced samples.

    Raises InputError if the folder holds no package that can be read.
    """
    package = folder / FOLDER_MODEL
    digest = hashlib.sha256()
    try:
        # The manifest is left out: it holds random ids, new ones at each conversion.
        files = sorted(path for path in (package / "Data").rglob("*") if path.is_file())
        for path in files:
            digest.update(f"\0{path.relative_to(package)}\0{path.stat().st_size}\0".encode())
            _add_samples(digest.update, path)
    except OSError as error:
        raise InputError(f"{package} can't be read ({error.strerror}): convert the model again.") from error
    if not files:
        raise InputError(f"{folder} holds no {FOLDER_MODEL}: make one with `launch-pipeline convert`.")
    return digest.hexdigest()


def recorded(place: ExaminedSystem) -> EngineVerdict | None:
    """The outcome of an earlier examination, if a readable one is recorded."""
    try:
        verdict = msgspec.json.decode(_file(place).read_bytes(), type=EngineVerdict)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    return verdict if verdict.place == place else None


def record(verdict: EngineVerdict) -> Path:
    """Record an outcome. Returns the file."""
    file = _file(verdict.place)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_private(file, msgspec.json.encode(verdict))
    return file


def all_recorded() -> list[EngineVerdict]:
    """Every readable outcome, the latest last."""
    files = sorted((cache_folder() / "neural-engine").glob("*.json"), key=lambda file: file.stat().st_mtime)
    found: list[EngineVerdict] = []
    for file in files:
        try:
            found.append(msgspec.json.decode(file.read_bytes(), type=EngineVerdict))
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            continue
    return found


def _file(place: ExaminedSystem) -> Path:
    name = hashlib.sha256(msgspec.json.encode(place)).hexdigest()
    return cache_folder() / "neural-engine" / f"{name}.json"


def _add_samples(add: Callable[[bytes], object], path: Path) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= _SAMPLES * _SAMPLE_BYTES:
            add(file.read())
            return
        for sample in range(_SAMPLES):
            file.seek((size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
            add(file.read(_SAMPLE_BYTES))
