"""An mlx-lm checkpoint as plain arrays and sizes, by Llama's names. Knows mlx-lm's models, not Core ML."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model, load_model

from draft_worker.coreml.conversion.architectures import Architecture, architecture_of, known
from draft_worker.coreml.conversion.convertible import Convertible
from draft_worker.coreml.conversion.layers import NotConvertible, read_structure
from draft_worker.coreml.package import DecoderShape
from draft_worker.head_tokens import HeadTokens, read_head_tokens
from protocol.errors import InputError


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
            loaded: Any = load_model(folder, lazy=True, trust_remote_code=False)
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
