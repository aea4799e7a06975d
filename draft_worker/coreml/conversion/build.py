"""Converts a checkpoint to a folder that a draft worker can run: package, host tables, tokenizer. Needs no torch.

An mlx-lm checkpoint is read as plain arrays and sizes, by Llama's names.
"""

import importlib.metadata
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any, TypeAlias

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model

from draft_worker.coreml.conversion.architectures import Architecture, architecture_of, known
from draft_worker.coreml.conversion.convertible import Convertible
from draft_worker.coreml.conversion.graph import decoder, feature_reader
from draft_worker.coreml.conversion.layers import NotConvertible, read_structure
from draft_worker.coreml.conversion.weights import Constants, head_chunks
from draft_worker.coreml.package import HOST, METADATA_KEY, MODEL, DecoderShape, Package, rotation_tables
from draft_worker.coreml.toolchain import toolchain
from draft_worker.short_head import HeadTokens, read_head_tokens
from protocol.contracts.coreml.conversion import FOLDER_FACTS, Choices, Progress
from protocol.contracts.tokenizer_fingerprint import tokenizer_fingerprint
from protocol.errors import InputError
from protocol.inference.stored_model import load_network


class Checkpoint(Convertible):
    """A decoder of one of the known architectures; quantised weights are dequantised by `mx.dequantize`.

    `network`: a loaded mlx-lm model. `config`: the content of config.json; without one, what the model keeps of it.
    `head_tokens`: the tokens of the head if it has only some. Raises InputError for any other architecture, and for
    one in a form that can't be converted.
    """

    def __init__(
        self,
        network: Any,
        folder: Path = Path(),
        head_tokens: HeadTokens | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        # Models with pictures hold the decoder as their language model; the converter takes the decoder alone.
        network = getattr(network, "language_model", network)
        architecture = architecture_of(network)
        if architecture is None:
            raise _refusal(folder, f"its architecture is {type(network).__module__.split('.')[-1]}")
        try:
            structure = read_structure(network, architecture, config or {})
        except NotConvertible as error:
            raise _refusal(folder, str(error)) from error
        parameters = dict(tree_flatten(dequantize_model(network).parameters()))
        super().__init__(folder, structure, dict(_canonical(parameters, architecture, structure.shape)), head_tokens)

    @classmethod
    def load(cls, folder: Path) -> "Checkpoint":
        """The model in a folder of config.json and model*.safetensors; code in the folder is never run."""
        try:
            loaded: Any = load_network(folder)
        except FileNotFoundError as error:
            raise InputError(
                f"{folder} holds no model ({error}): pass a folder with config.json and model*.safetensors."
            ) from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200].rstrip(".")
            raise InputError(f"The model in {folder} can't be loaded ({reason}): download it again.") from error
        network, config = loaded
        vocabulary = getattr(network, "language_model", network).args.vocab_size
        return cls(network, folder, read_head_tokens(folder, vocabulary), config)


def _canonical(
    parameters: Mapping[str, mx.array], architecture: Architecture, shape: DecoderShape
) -> Iterator[tuple[str, mx.array]]:
    """The parameters by Llama's names: renamed, fused matrices divided, and norms with their offset."""
    for given, array in parameters.items():
        *path, part, kind = [architecture.names.get(component, component) for component in given.split(".")]
        if part.endswith("norm"):
            array = array.astype(mx.float32) + architecture.norm_offset
        names = architecture.fused.get(part, (part,))
        for name, rows in zip(names, _divided(array, names, shape), strict=True):
            yield ".".join([*path, name, kind]), rows


def _divided(array: mx.array, names: tuple[str, ...], shape: DecoderShape) -> Iterator[mx.array]:
    """The rows of each of `names`, in this order."""
    if names == ("q_proj", "k_proj", "v_proj"):
        sizes = [shape.head * heads for heads in (shape.heads, shape.key_heads, shape.key_heads)]
    else:
        sizes = [len(array) // len(names)] * len(names)
    begin = 0
    for size in sizes:
        yield array[begin : begin + size]
        begin += size


def _refusal(folder: Path, reason: str) -> InputError:
    return InputError(
        f"The model in {folder} can't be converted ({reason}): "
        f"choose one of the architectures {known()}, or use the MLX draft engine."
    )


OnReport: TypeAlias = Callable[[Progress], None]

_SLOT_MULTIPLE = 32
"""The context is a multiple of this: 64 bytes of fp16."""
_MAX_AXIS = 16_384
"""The Neural Engine's longest axis."""
_DEFAULT_CONTEXT = 2048
_COPIED = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")


def convert(source: Path, destination: Path, choices: Choices, report: OnReport = lambda _: None) -> Package:
    """Write `destination`/model.mlpackage, host.safetensors and the source's configuration and tokenizer.

    A complete conversion replaces an earlier one in `destination`. Raises InputError for a source that can't be
    converted, for choices that don't fit it, and for a destination with other files.
    """
    tokenizer = tokenizer_fingerprint(source)
    return write(Checkpoint.load(source), destination, choices, tokenizer, report)


def write(
    model: Convertible,
    destination: Path,
    choices: Choices,
    tokenizer: str = "",
    report: OnReport = lambda _: None,
    tokenizer_folder: Path | None = None,
    prove: Callable[[Path], None] = lambda _: None,
) -> Package:
    """Like `convert`, for a loaded model. `tokenizer`: the fingerprint of its tokenizer, which is in `tokenizer_folder`
    if not in the model's own. `prove` raises an error if the new folder's package does not compute what it should."""
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
        _fill(unfinished, model, package, report, tokenizer_folder or model.folder)
        prove(unfinished)
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


def describe(model: Convertible, choices: Choices, tokenizer: str = "") -> Package:
    """The package that `choices` give. Raises InputError if they don't fit the model or the Neural Engine."""
    context = choices.context
    if context is None:
        context = min(_DEFAULT_CONTEXT, model.shape.positions // _SLOT_MULTIPLE * _SLOT_MULTIPLE)
    widths = _widths(model, choices.widths)
    _check(model.shape.positions, context, widths)
    return Package(
        source=str(model.folder),
        shape=model.shape,
        widths=tuple(sorted(set(widths))),
        context=context,
        weights=choices.weights,
        outputs=tuple(len(chunk) for chunk in head_chunks(range(model.head_rows))),
        model=model.fingerprint(),
        tokenizer=tokenizer,
        reordered=model.reordered,
        position_scale=model.position_scale(context) is not None,
        conditioning=model.conditioning,
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


def _widths(model: Convertible, chosen: tuple[int, ...]) -> tuple[int, ...]:
    """Of a block drafter, the widths that a block fits in, at least one."""
    block = None if model.conditioning is None else model.conditioning.block
    if block is None:
        return chosen
    needed = block.clean_prefix + block.masks
    return tuple(width for width in chosen if width >= needed) or (-(-needed // 8) * 8,)


def _require_replaceable(destination: Path) -> None:
    if destination.exists() and not destination.is_dir():
        raise InputError(f"{destination} is a file: pass a new folder.")
    if destination.is_dir() and any(destination.iterdir()) and not (destination / MODEL).is_dir():
        raise InputError(f"{destination} holds other files: pass a new or empty folder.")


def _fill(folder: Path, model: Convertible, package: Package, report: OnReport, tokenizer_folder: Path) -> None:
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
    (folder / FOLDER_FACTS).write_text(package.encode())
    for name in _COPIED:
        source = model.folder if name == "config.json" else tokenizer_folder
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _program(model: Convertible, package: Package, on_layer: Callable[[], None]) -> Any:
    """A program with one function for each width, and a trained drafter's function that reads features.

    A constant's id is its parameter's name, so coremltools writes it once for all functions. `save_multifunction` would
    need a separate package for each function first.
    """
    program = toolchain().program.Program()
    constants = Constants(model, package.weights)
    for width in package.widths:
        program.add_function(package.function(width), decoder(package, constants, width, on_layer))
    if package.conditioning is not None:
        reader = feature_reader(package, constants, package.conditioning)
        program.add_function(package.conditioning.function, reader)
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


def _save_host(model: Convertible, package: Package, path: Path) -> None:
    tables: dict[str, Any] = {"embedding": mx.array(model.half("model.embed_tokens.weight"))}
    for index, rotation in enumerate(model.rotations(package.context)):
        tables |= {name: mx.array(table) for name, table in zip(rotation_tables(index), rotation, strict=True)}
    if (scale := model.position_scale(package.context)) is not None:
        tables["position_scale"] = mx.array(scale)
    if model.head_tokens is not None:
        tables["head_tokens"] = mx.array(model.head_tokens)
    own = {} if package.conditioning is None else package.conditioning.host_parameters(package.head_rows)
    tables |= {name: mx.array(model.half(name)) for name in own}
    mx.save_safetensors(str(path), tables, metadata={"model": package.model})
