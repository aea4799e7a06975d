"""A drafter's config.json and tensor headers, read with checks: what is missing or absurd gets a sentence."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

from protocol.contracts.head_tokens import stored_head_tokens
from protocol.contracts.model_folder import ModelFolder, Tensor
from protocol.errors import InputError
from protocol.json_values import is_list, is_object

_MOST = 1 << 24
"""Of any number in a config."""
_TABLES = ("d2t", "t2d")
"""Tables between two vocabularies, which are no parameters."""


class DrafterCheckpoint:
    """`name` says in sentences what the folder is said to hold."""

    def __init__(self, folder: Path, name: str, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.folder = folder
        self.name = name
        self.config = config
        self.tensors = tensors

    @classmethod
    def read(cls, folder: Path, name: str, config: dict[str, Any]) -> Self:
        """Raises InputError for damaged weights."""
        return cls(folder, name, config, ModelFolder(folder, "*.safetensors").tensors)

    def without_prefix(self, prefix: str) -> "DrafterCheckpoint":
        """The same with tensors named without it."""
        tensors = {name.removeprefix(prefix): tensor for name, tensor in self.tensors.items()}
        return DrafterCheckpoint(self.folder, self.name, self.config, tensors)

    def with_config(self, config: dict[str, Any]) -> "DrafterCheckpoint":
        """The same with another config."""
        return DrafterCheckpoint(self.folder, self.name, config, self.tensors)

    def part(self, name: str) -> "DrafterCheckpoint":
        """The same with an object in the config as its config."""
        inner = self.config.get(name)
        if not is_object(inner):
            raise self.wrong(f"its config.json has no {name}")
        return self.with_config(inner)

    def number(self, name: str, least: int = 1) -> int:
        value = self.config.get(name)
        if type(value) is not int or not least <= value <= _MOST:
            raise self.wrong(f"its config.json states {name} {value!r:.60}, which must be a number from {least} on")
        return value

    def number_or(self, name: str, default: int | None, least: int = 1) -> int | None:
        """`default` if the config leaves it out or has null."""
        return default if self.config.get(name) is None else self.number(name, least)

    def numbers(self, name: str) -> tuple[int, ...] | None:
        """Ascending numbers from 0 on; None if the config leaves them out."""
        values = self.config.get(name)
        if values is None:
            return None
        good = is_list(values) and 0 < len(values) <= 32 and all(type(value) is int for value in values)
        if not good or values != sorted(set(values)) or not 0 <= values[0] <= values[-1] <= 1024:
            raise self.wrong(f"its config.json states {name} {values!r:.80}, which must be layers in ascending order")
        return tuple(values)

    def has(self, *names: str) -> bool:
        return all(name in self.tensors for name in names)

    def need(self, *names: str) -> None:
        if not self.tensors:
            # Some are published as pytorch_model.bin alone, which can run code when it is opened.
            raise InputError(
                f"{self.folder} holds {self.name} without model.safetensors, and weights in other formats are never "
                "opened: save them as safetensors with the program that made them, or choose another draft."
            )
        for name in names:
            if name not in self.tensors:
                raise self.wrong(f"it lacks the tensor {name}")

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor that must be there, as it is when its weights are not quantised."""
        self.need(name)
        return self._unpacked(name)

    def require(self, name: str, shape: tuple[int, ...]) -> None:
        found = self.shape(name)
        if found != shape:
            raise self.wrong(f"its tensor {name} has the shape {found}, and its config.json says {shape}")

    def head_tokens(self) -> int | None:
        """How many tokens our own file beside the weights lets it draft; None without the file: all."""
        try:
            tokens = stored_head_tokens(self.folder)
            return None if tokens is None else len(tokens)
        except (ValueError, TypeError) as error:
            raise self.wrong(str(error)) from error

    def parameters(self, but: Iterable[str] = (), *, by_token: Iterable[str] = (), tokens: int | None = None) -> int:
        """Of all tensors, less those whose names contain one of `but`. Of a tensor whose name contains one of
        `by_token`, `tokens` rows count; None: all."""
        left_out = (*but, *_TABLES)
        names = [name for name in self.tensors if not name.endswith((".scales", ".biases"))]
        counted = [name for name in names if not any(part in name for part in left_out)]
        total = 0
        for name in counted:
            shape = self._unpacked(name)
            if tokens is not None and any(part in name for part in by_token):
                shape = (tokens, *shape[1:])
            total += self.tensors[name]._replace(shape=shape).elements
        return total

    def wrong(self, reason: str) -> InputError:
        return InputError(
            f"{self.folder} is said to hold {self.name}, but {reason}: download it again, or choose another draft."
        )

    def _unpacked(self, name: str) -> tuple[int, ...]:
        tensor = self.tensors[name]
        if f"{name.removesuffix('weight')}scales" not in self.tensors or tensor.type != "U32":
            return tensor.shape
        quantization = self.config.get("quantization")
        bits = quantization.get("bits") if is_object(quantization) else None
        if type(bits) is not int or not 1 <= bits <= 32:
            raise self.wrong(f"its tensor {name} is quantised, and its config.json does not say how")
        return (*tensor.shape[:-1], tensor.shape[-1] * 32 // bits)
