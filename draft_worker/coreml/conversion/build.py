"""Converts a checkpoint to a folder that a draft worker can run: package, host tables, tokenizer. Needs no torch."""

import importlib.metadata
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec

from draft_worker.coreml.conversion.checkpoint import Checkpoint
from draft_worker.coreml.conversion.graph import decoder
from draft_worker.coreml.conversion.weights import Constants, head_chunks
from draft_worker.coreml.package import HOST, METADATA_KEY, MODEL, Package, rotation_tables
from draft_worker.coreml.toolchain import toolchain
from protocol.contracts.coreml import FOLDER_FACTS, Choices, OnProgress, Progress, silent
from protocol.contracts.tokenizer_fingerprint import tokenizer_fingerprint
from protocol.errors import InputError
from protocol.speculation.successors import SUCCESSORS

_SLOT_MULTIPLE = 32
"""The context is a multiple of this: 64 bytes of fp16."""
_MAX_AXIS = 16_384
"""The Neural Engine's longest axis."""
_DEFAULT_CONTEXT = 2048
_COPIED = (
    *("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"),
    SUCCESSORS,
)


def convert(source: Path, destination: Path, choices: Choices, report: OnProgress = silent) -> Package:
    """Write `destination`/model.mlpackage, host.safetensors and the source's configuration and tokenizer.

    A complete conversion replaces an earlier one in `destination`. Raises InputError for a source that can't be
    converted, for choices that don't fit it, and for a destination with other files.
    """
    tokenizer = tokenizer_fingerprint(source)
    return write(Checkpoint.load(source), destination, choices, tokenizer, report)


def write(
    model: Checkpoint, destination: Path, choices: Choices, tokenizer: str = "", report: OnProgress = silent
) -> Package:
    """Like `convert`, for a loaded model. `tokenizer`: the fingerprint of its tokenizer."""
    package = describe(model, choices, tokenizer)
    destination = destination.resolve()
    _require_replaceable(destination)
    # Written to a sibling folder and renamed when complete: an interrupted conversion leaves no partial model.
    destination.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix=f".{destination.name}-", dir=destination.parent) as temporary,
        _temporary_files_in(temporary),
    ):
        unfinished = Path(temporary) / destination.name
        unfinished.mkdir()
        _fill(unfinished, model, package, report)
        if destination.exists():
            shutil.rmtree(destination)
        unfinished.rename(destination)
    return package


@contextmanager
def _temporary_files_in(folder: str) -> Iterator[None]:
    """coremltools writes each package to a temporary folder first, and removes that only when its process exits."""
    before, tempfile.tempdir = tempfile.tempdir, folder
    try:
        yield
    finally:
        tempfile.tempdir = before


def describe(model: Checkpoint, choices: Choices, tokenizer: str = "") -> Package:
    """The package that `choices` give. Raises InputError if they don't fit the model or the Neural Engine."""
    context = choices.context
    if context is None:
        context = min(_DEFAULT_CONTEXT, model.shape.positions // _SLOT_MULTIPLE * _SLOT_MULTIPLE)
    _check(model.shape.positions, context, choices.widths)
    return Package(
        source=str(model.folder),
        shape=model.shape,
        widths=tuple(sorted(set(choices.widths))),
        context=context,
        weights=choices.weights,
        outputs=tuple(len(chunk) for chunk in head_chunks(range(model.head_rows))),
        model=model.fingerprint(),
        tokenizer=tokenizer,
        position_scale=model.position_scale(context) is not None,
        version=importlib.metadata.version("launch-pipeline"),
    )


def _check(positions: int, context: int, widths: tuple[int, ...]) -> None:
    if not widths or not 1 <= min(widths) <= max(widths) <= context:
        raise InputError("Each width must be at least 1 and at most the context: pass for example --widths 1,8,32.")
    if context > positions:
        raise InputError(f"The model knows {positions} positions: choose a --context up to that, not {context}.")
    if context % _SLOT_MULTIPLE or context + max(widths) > _MAX_AXIS:
        limit = (_MAX_AXIS - max(widths)) // _SLOT_MULTIPLE * _SLOT_MULTIPLE
        raise InputError(
            f"The Neural Engine can't run a context of {context}: choose a multiple of {_SLOT_MULTIPLE} up to {limit}."
        )


def _require_replaceable(destination: Path) -> None:
    if destination.exists() and not destination.is_dir():
        raise InputError(f"{destination} is a file: pass a new folder.")
    if destination.is_dir() and any(destination.iterdir()) and not (destination / MODEL).is_dir():
        raise InputError(f"{destination} holds other files: pass a new or empty folder.")


def _fill(folder: Path, model: Checkpoint, package: Package, report: OnProgress) -> None:
    layers = len(package.widths) * len(package.shape.layers)
    built = 0

    def on_layer() -> None:
        nonlocal built
        built += 1
        report(Progress("graph", built, layers + 2))

    report(Progress("graph", 0, layers + 2))
    program = _program(model, package, on_layer)
    report(Progress("package", layers, layers + 2))
    _save(program, package, folder / MODEL)
    report(Progress("host's tables", layers + 1, layers + 2))
    _save_host(model, package, folder / HOST)
    (folder / FOLDER_FACTS).write_bytes(msgspec.json.encode(package.facts))
    for name in _COPIED:
        if (model.folder / name).is_file():
            shutil.copyfile(model.folder / name, folder / name)


def _program(model: Checkpoint, package: Package, on_layer: Callable[[], None]) -> Any:
    """A program with one function for each width.

    A constant's id is its parameter's name, so coremltools writes it once for all functions. `save_multifunction` would
    need a separate package for each function first.
    """
    program = toolchain().program.Program()
    constants = Constants(model, package.weights)
    for width in package.widths:
        program.add_function(package.function(width), decoder(package, constants, width, on_layer))
    program.default_function_name = package.function(package.widths[0])
    program.export_as_multifunction = True
    return program


def _save(program: Any, package: Package, path: Path) -> None:
    coremltools = toolchain().coremltools
    # coremltools writes progress bars to standard error.
    with redirect_stderr(StringIO()):
        model = coremltools.convert(
            program,
            convert_to="mlprogram",
            minimum_deployment_target=coremltools.target.iOS18,
            # The program already is fp16; the pass for FLOAT16 would only add casts.
            compute_precision=coremltools.precision.FLOAT32,
            # The graph needs no optimisation: the default passes take most of the time and change nothing.
            pass_pipeline=coremltools.PassPipeline.EMPTY,
            skip_model_load=True,
        )
    model.user_defined_metadata[METADATA_KEY] = package.encode()
    model.short_description = f"Draft model for speculative decoding, made from {package.source}."
    model.save(str(path))


def _save_host(model: Checkpoint, package: Package, path: Path) -> None:
    tables: dict[str, Any] = {"embedding": mx.array(model.half("model.embed_tokens.weight"))}
    for index, rotation in enumerate(model.rotations(package.context)):
        tables |= {name: mx.array(table) for name, table in zip(rotation_tables(index), rotation, strict=True)}
    if (scale := model.position_scale(package.context)) is not None:
        tables["position_scale"] = mx.array(scale)
    if model.head_tokens is not None:
        tables["head_tokens"] = mx.array(model.head_tokens)
    mx.save_safetensors(str(path), tables, metadata={"model": package.model})
