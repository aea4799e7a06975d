"""The folder of a draft for Core ML: a converted one, or a model that is converted on its first use."""

import importlib.metadata
import shutil
from collections.abc import Generator
from contextlib import closing
from hashlib import sha256
from pathlib import Path

import msgspec

from orchestrator.machine.cache_entries import exclusive
from orchestrator.machine.checkpoints import resolve
from protocol.child_process import reports
from protocol.contracts.coreml import (
    FOLDER_FACTS,
    FOLDER_MODEL,
    FORMAT,
    Choices,
    ConversionOrder,
    ConversionReport,
    Facts,
    Finished,
    OnProgress,
    Progress,
    silent,
)
from protocol.contracts.model_folder import ModelFolder
from protocol.errors import InputError
from protocol.paths import cache_folder
from protocol.shown_names import model_name

_PARTS = (FOLDER_FACTS, "host.safetensors", "config.json", "tokenizer.json")


def converted_draft(name: str, on_progress: OnProgress = silent) -> Path:
    """Folder of the converted model `name`, or of a conversion of the model `name`.

    A conversion in fp16 is made once and kept in this user's cache folder. Raises InputError for a name that is
    neither, and for a model that can't be converted.
    """
    if is_converted(folder := Path(name).expanduser()):
        return _checked(folder.resolve())
    source = resolve(name, "draft", on_progress)
    place = conversion_of(source)
    with exclusive(place):
        if not is_converted(place):
            _sweep(place)
            try:
                _convert(source, place, on_progress)
            finally:
                # A process that did not end in time was killed, and left what it had written.
                _sweep(place)
    return _checked(place)


def conversion_of(source: Path) -> Path:
    """The folder in this user's cache where a conversion of the model in `source` is kept, once it is made."""
    version = importlib.metadata.version("launch-pipeline")
    key = sha256(f"{FORMAT} {version} {ModelFolder(source).fingerprint}".encode()).hexdigest()[:32]
    return cache_folder() / "converted" / f"{model_name(source)}-{key}"


def loaded_bytes(folder: Path) -> int:
    """Memory that the converted model in `folder` takes when it is loaded, estimated from its files.

    Every loaded function has its own copy of the weights (coremltools issue 2351).
    """
    weights = sum(file.stat().st_size for file in (folder / FOLDER_MODEL).rglob("weight.bin"))
    return weights * len(_facts(folder).widths) + (folder / "host.safetensors").stat().st_size


def cache_bytes(folder: Path) -> int:
    """Memory of one request's KV beside the converted model in `folder`."""
    return _facts(folder).cache_bytes


def is_converted(folder: Path) -> bool:
    """Whether it is the folder of a converted model, complete or not."""
    return (folder / FOLDER_MODEL).is_dir()


def source_of(folder: Path) -> Path:
    """The model that a converted folder was made from. Raises InputError if it is no longer there."""
    source = Path(_facts(folder).source)
    if not source.is_dir():
        raise InputError(f"{source}, from which {folder} was converted, is gone: pass a model as the draft.")
    return resolve(str(source), "draft")


def _convert(source: Path, place: Path, on_progress: OnProgress) -> None:
    # Closing ends the process, also after Ctrl-C.
    with closing(conversion(source, place, Choices())) as reports:
        for report in reports:
            if not isinstance(report, Finished):
                on_progress(msgspec.structs.replace(report, stage=f"converting for Core ML: {report.stage}"))


def _sweep(place: Path) -> None:
    """Remove what conversions left that were killed. The lock of `place` is ours, so none is at work there."""
    for unfinished in place.parent.glob(f".{place.name}-*"):
        shutil.rmtree(unfinished, ignore_errors=True)


def _checked(folder: Path) -> Path:
    missing = [part for part in _PARTS if not (folder / part).is_file()]
    if missing:
        raise InputError(f"{folder} lacks {missing[0]}: convert the model again with `launch-pipeline convert`.")
    if _facts(folder).format != FORMAT:
        raise InputError(f"{folder} was converted by another version: convert the model again.")
    return folder


def _facts(folder: Path) -> Facts:
    try:
        return msgspec.json.decode((folder / FOLDER_FACTS).read_bytes(), type=Facts)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{folder}/{FOLDER_FACTS} can't be read ({error}): convert the model again.") from error


_GRACE = 5.0
"""Seconds for the process to remove an unfinished conversion."""


def conversion(source: Path, destination: Path, choices: Choices) -> Generator[Progress | Finished, None, None]:
    """Progress as it happens, and the outcome last. Closing it early ends the process.

    Raises InputError or PipelineError with the process's own sentence if the conversion fails.
    """
    order = ConversionOrder(source=str(source), destination=str(destination), choices=choices)
    return reports(
        "draft_worker.coreml.conversion",
        order,
        ConversionReport,
        (Finished,),
        name="The conversion",
        grace=_GRACE,
    )
