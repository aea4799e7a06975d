"""What the processes around Core ML tell one another, and what is recorded of this machine's Neural Engine.

Orders to convert and to examine, with their reports as one JSON object a line of standard output, and the outcome of an
examination in a file. Plain types; knows no Core ML.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from protocol.child_process import Failed
from protocol.errors import InputError
from protocol.paths import cache_folder, record_file
from protocol.security.private_files import keep, kept

FOLDER_MODEL = "model.mlpackage"
"""A folder with this package is a converted model."""
FOLDER_FACTS = "package.json"
"""Facts about the package, for processes that can't read packages."""
FORMAT = 8
"""Of a converted model's folder; a folder of another format is converted again."""

WeightKind: TypeAlias = Literal["fp16", "int8", "4bit"]
"""Unchanged; with one scale per output channel; with a palette of sixteen numbers per output channel."""


class Choices(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the user may choose about a conversion."""

    widths: tuple[int, ...] = (1, 8, 32)
    """Tokens that one call evaluates; each width is a function of its own."""
    context: int | None = None
    """KV slots; None for 2048, or for the model's context if that is less."""
    weights: WeightKind = "fp16"


class ConversionOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The one JSON argument of `python -m draft_worker.coreml.conversion`."""

    source: str
    destination: str
    choices: Choices


class Facts(msgspec.Struct, frozen=True):
    """What FOLDER_FACTS holds, for a process that starts a draft."""

    source: str
    """Folder or id of the model that was converted."""
    widths: tuple[int, ...] = ()
    """Each has a function of its own."""
    cache_bytes: int = 0
    """Memory of one request's KV: float32 for every slot, whatever is used."""
    format: int = FORMAT


class Progress(msgspec.Struct, frozen=True, tag="progress", forbid_unknown_fields=True):
    """`done` of `total` steps are done; `stage` names the step that begins."""

    stage: str
    done: int
    total: int


OnProgress: TypeAlias = Callable[[Progress], None]
"""How long work on models reports its progress."""


def silent(_: Progress) -> None:
    """Reports nothing."""


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag="finished", forbid_unknown_fields=True):
    """The end of a conversion that succeeded."""

    folder: str
    package_bytes: int
    host_bytes: int
    """Embedding and rotations, which stay with the host."""
    context: int
    seconds: float


ConversionReport: TypeAlias = Progress | Finished | Failed


# Examination ---------------------------------------------------------------------------------------
# Each stage is a process of its own: a device's compiler or driver may crash or hang the process that calls it.

Stage: TypeAlias = Literal["golden", "predict", "plan"]
"""golden: the executor's logits, to a file; predict: the device's logits, many times; plan: where operations run."""
RuntimeName: TypeAlias = Literal["coreml", "executor"]
Units: TypeAlias = Literal["CPU_AND_NE", "CPU_ONLY"]


class ExaminationOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The last argument of the process, in JSON."""

    folder: str
    """Of the converted model."""
    stage: Stage
    golden: str
    """File of the executor's logits: written by the golden stage, read by the predict stage."""
    runtime: RuntimeName = "coreml"
    units: Units = "CPU_AND_NE"
    predicts: int = 300


class Loading(msgspec.Struct, frozen=True, tag="loading", forbid_unknown_fields=True):
    """Something begins to load. A device's compiler may be silent for many minutes until the next report."""

    width: int | None
    """The function; None: the whole package."""


class Loaded(msgspec.Struct, frozen=True, tag="loaded", forbid_unknown_fields=True):
    """The function of this width is loaded."""

    width: int
    seconds: float


class Agreed(msgspec.Struct, frozen=True, tag="agreed", forbid_unknown_fields=True):
    """How the device's logits compare with the executor's."""

    width: int
    deviation: float | None
    """Root mean square of the difference, in standard deviations of a token's logits; None if the device's logits are
    not finite."""
    clear: int
    """Tokens at which the executor's favourite is so far ahead that such a deviation can't change it."""
    same: int
    """Those of them at which the device has the same favourite."""


class Predicted(msgspec.Struct, frozen=True, tag="predicted", forbid_unknown_fields=True):
    """So many predicts of the order's number are done."""

    done: int
    steady: bool
    """All of them gave the same logits as the first of their width."""


class Timed(msgspec.Struct, frozen=True, tag="timed", forbid_unknown_fields=True):
    """The median time of a predict."""

    width: int
    milliseconds: float


class Placed(msgspec.Struct, frozen=True, tag="placed", forbid_unknown_fields=True):
    """Where Core ML would run a function's operations, by its own report."""

    function: str
    operations: int
    engine: int
    """Operations on the Neural Engine."""
    cost: float
    """Their share of the function's estimated cost."""
    elsewhere: dict[str, int]
    """The other operations, counted by kind."""


class Written(msgspec.Struct, frozen=True, tag="written", forbid_unknown_fields=True):
    """The golden stage has ended."""


class Broken(msgspec.Struct, frozen=True, tag="broken", forbid_unknown_fields=True):
    """The stage has failed, with a sentence that says why."""

    text: str
    lasting: bool = True
    """The cause is the model or the system, so that the stage would fail again; not a full disk, for example."""


ExaminationReport: TypeAlias = Loading | Loaded | Agreed | Predicted | Timed | Placed | Written | Broken


# What is recorded ----------------------------------------------------------------------------------

EngineChoice: TypeAlias = Literal["coreml", "mlx"]
"""The engine that a draft should use here."""
_FOLDER = "neural-engine"
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
    choice: EngineChoice | Literal["unknown"]
    """unknown: what failed may succeed on a quiet machine, where it is tried again."""
    reason: str
    """One sentence without a full stop."""
    deaths: int = 0
    """Examinations in succession that a signal ended."""
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
    return kept(record_file(_FOLDER, place), EngineVerdict)


def record(verdict: EngineVerdict) -> Path:
    """Record an outcome. Returns the file."""
    file = record_file(_FOLDER, verdict.place)
    keep(file, verdict)
    return file


def all_recorded() -> list[EngineVerdict]:
    """Every readable outcome, the latest last."""
    files = sorted((cache_folder() / _FOLDER).glob("*.json"), key=lambda file: file.stat().st_mtime)
    return [verdict for file in files if (verdict := kept(file, EngineVerdict)) is not None]


def _add_samples(add: Callable[[bytes], object], path: Path) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= _SAMPLES * _SAMPLE_BYTES:
            add(file.read())
            return
        for sample in range(_SAMPLES):
            file.seek((size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
            add(file.read(_SAMPLE_BYTES))
