"""What can be known of a model's folder without loading it: its config.json, and its weights by their files' headers.

Reads no tensor and knows no MLX.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import msgspec

from protocol.errors import InputError
from protocol.json_values import is_object

if TYPE_CHECKING:
    from numpy.typing import NDArray

HEAD_TOKENS = "head_tokens.npy"
"""Beside a draft that guesses only some tokens: those of its head, ascending int32 in numpy's format. A program that
does not know the file reads the folder as an ordinary model."""


def stored_head_tokens(folder: Path) -> "NDArray[Any] | None":
    """What the file of a draft holds, unchecked and not read yet; None without it. Raises ValueError if it is no
    array."""
    file = folder / HEAD_TOKENS
    if not file.exists():
        return None
    # Commands read models without this file.
    from numpy.lib.format import open_memmap

    try:
        # Mapped: of an array larger than the file, memory would be taken before its end is noticed.
        return open_memmap(file, "r")
    except Exception as error:  # numpy parses the header with Python's own parser, which raises nearly anything
        raise ValueError(f"{file} can't be read ({str(error) or type(error).__name__})") from error


WEIGHTS = "model*.safetensors"
"""The files that mlx-lm and Transformers read."""
PROCESSOR_BYTES = 4
"""Of each weight on a processor that is unpacked to float32 (`protocol.inference.stored_model`)."""
_OWN_SCALES = re.compile(r"(?:experts|switch_mlp)\..*(?:scale_2|global_scale)")
"""Names of experts' scales that a processor heeds in unpacked weights alone."""
SHARED = re.compile(r"(?:^|\.)(?:embed_tokens|lm_head|wte)\.")
"""Names of the embedding and the head."""

_CONFIG = "config.json"
_POSITIONS = ("max_position_embeddings", "n_positions", "model_max_length", "max_seq_len", "block_size")
_WIDTHS = ("hidden_size", "n_embd", "d_model", "dim")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_VOCABULARIES = ("vocab_size", "padded_vocab_size")
_BITS = re.compile(r"[A-Z]+(\d+)")
_INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors")
_UNFINISHED = ("*.safetensors.part", "*.safetensors.aria2", "*.safetensors.crdownload", "*.safetensors.download")
"""What programs that fetch files leave beside or instead of them."""
_MOST_HEADER = 100 << 20
"""As in the safetensors library."""
_POINTER = b"version "
"""How a file begins that stands for a large one in a Git repository."""
_SAMPLES = 16
_SAMPLE_BYTES = 4096


class Tensor(NamedTuple):
    """`type`: as the format names it, such as F16."""

    type: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


class TargetShape(NamedTuple):
    """The numbers of a target that its drafters must fit."""

    layers: int
    width: int
    """Elements of the residual stream."""
    vocabulary: int


class ModelFolder:
    """A model's folder as it is on this machine. What is asked for is read then, and raises InputError if it can't be.

    `weights`: the names of the files with its weights.
    """

    def __init__(self, path: Path, weights: str = WEIGHTS) -> None:
        self.path = path
        self._weights = weights

    # What the config states ----------------------------------------------------------------------

    @cached_property
    def config(self) -> dict[str, Any]:
        """The content of config.json."""
        if not (self.path / _CONFIG).exists():
            raise InputError(f"{self.path} has no {_CONFIG}: pass the folder of a complete model or drafter.")
        config = self._json(_CONFIG)
        if not is_object(config):
            raise InputError(f"{self.path}/{_CONFIG} is no JSON object: download the model again.")
        return config

    def settings(self, name: str) -> dict[str, Any]:
        """The JSON object in another file; empty if there is none."""
        content = self._json(name)
        return content if is_object(content) else {}

    def _json(self, name: str) -> object:
        """What the file holds; None without the file."""
        file = self.path / name
        try:
            return json.loads(file.read_bytes()) if file.is_file() else None
        except OSError as error:
            raise InputError(f"{file} can't be read ({error.strerror}): check its permissions.") from error
        except (ValueError, RecursionError) as error:
            dispensable = "" if name == _CONFIG else ", or delete the file"
            raise InputError(f"{file} is broken ({error}): download the model again{dispensable}.") from error

    @property
    def positions(self) -> int | None:
        """As `stated_positions`."""
        return stated_positions(self.config)

    @property
    def vocabulary(self) -> int | None:
        """Tokens; None if the config does not state it."""
        return _first(self.config, _VOCABULARIES)

    @property
    def shape(self) -> TargetShape:
        """Raises InputError if the config does not state it."""
        shape = stated_shape(self.config)
        if shape is None:
            raise InputError(
                f"{self.path}/config.json states no layers, width or vocabulary, so no drafter can be checked against "
                "it: choose another target, or an ordinary model as the draft."
            )
        return shape

    # Its weights ---------------------------------------------------------------------------------

    @property
    def files(self) -> list[Path]:
        """The files with its weights."""
        return sorted(self.path.glob(self._weights))

    @property
    def size(self) -> int:
        """Bytes of these files."""
        return sum(file.stat().st_size for file in self.files if file.is_file())

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of these files, by name."""
        return {name: tensor for file in self.files for name, tensor in _tensors_of(file).items()}

    def tensor_bytes(self, on_processor: bool) -> dict[str, int]:
        """Bytes of each tensor in memory, by name. On a processor quantized weights are unpacked, and their scales and
        biases are gone."""
        if not on_processor:
            return {name: _stored(tensor) for name, tensor in self.tensors.items()}
        forms = self._forms()
        return {name: self._unpacked(name, tensor, forms) for name, tensor in self.tensors.items()}

    def loaded_bytes(self, on_processor: bool, ranks: int = 1, most: int | None = None) -> int:
        """Bytes of a language model's weights in memory, those of one of so many ranks among which it is divided.

        mlx-lm divides layers alone: each rank has the whole embedding and head. `most`: bytes that unpacked weights may
        take on a processor; if they would take more, they stay packed, with scales of 32 bits.
        """
        sizes = self.tensor_bytes(on_processor)
        packed = not any(map(_OWN_SCALES.search, self.tensors))
        if on_processor and packed and most is not None and sum(sizes.values()) > most:
            sizes = {
                name: _stored(tensor) if _bits(tensor) < 16 else tensor.elements * PROCESSOR_BYTES
                for name, tensor in self.tensors.items()
            }
        whole = sum(size for name, size in sizes.items() if SHARED.search(name))
        return whole + (sum(sizes.values()) - whole) // ranks

    def _unpacked(self, name: str, tensor: Tensor, forms: Mapping[str, tuple[int, int]]) -> int:
        module, _, kind = name.rpartition(".")
        scales = self.tensors.get(f"{module}.scales") or self.tensors.get(f"{module}.weight_scale")
        if scales is not None and kind not in ("weight", "weight_packed", "bias"):
            return 0
        if scales is None or kind == "bias" or tensor.type.startswith("F8"):
            return tensor.elements * PROCESSOR_BYTES
        stored = 8 * _stored(tensor)
        # An entry may have the name that another class of the model has for the layer: then sizes tell which it is.
        known = [forms.get(module, forms[""]), *forms.values()]
        bits = next((bits for bits, group in known if not group or bits * group * scales.elements == stored), 4)
        return stored // max(1, bits) * PROCESSOR_BYTES

    def _forms(self) -> Mapping[str, tuple[int, int]]:
        """Bits and group of a quantized weight by its module's name; "": of all others."""
        try:
            config = self.settings(_CONFIG)
            stated: Any = config.get("quantization") or config.get("quantization_config") or {}
            entries = {"": stated} | {name: each for name, each in stated.items() if is_object(each)}
            for name, group in dict(stated.get("config_groups") or {}).items():
                weights = group["weights"]
                entries[name] = {"bits": weights["num_bits"], "group_size": weights.get("group_size") or 0}
            return {name: (int(each.get("bits", 4)), int(each.get("group_size", 64))) for name, each in entries.items()}
        except (InputError, ValueError, AttributeError, TypeError, OverflowError):
            return {"": (4, 64)}

    # Whether it is whole -------------------------------------------------------------------------

    def require_complete(self) -> None:
        """Raises InputError for an unfinished download, and for files that are missing or are no files. Opens none."""
        for file in sorted(self.path.iterdir()):
            # A pipe would keep whoever opens it waiting for ever, whatever it stands for.
            special = file.exists() and not file.is_dir()
            if not file.is_file() and (special or file.suffix == ".safetensors"):
                raise InputError(f"{file} is not a regular file: download the model again.")
        unfinished = next((file.name for pattern in _UNFINISHED for file in sorted(self.path.glob(pattern))), None)
        if unfinished is not None:
            raise InputError(f"The download of {self.path} is unfinished ({unfinished}): download the model again.")
        named = set(self._index().values())
        if not named:
            for part in filter(None, (_SHARD.fullmatch(file.name) for file in self.files)):
                named |= {f"{part[1]}-{place:05}-of-{part[3]}.safetensors" for place in range(1, int(part[3]) + 1)}
        missing = sorted(name for name in named if not (self.path / name).is_file())
        if missing:
            raise InputError(
                f"{self.path} lacks {len(missing)} of its weight files, first {missing[0]}: download it again."
            )

    def examined_tensors(self) -> dict[str, Tensor]:
        """`tensors` of files that are complete. Raises InputError for a tensor that is in two files too."""
        self.require_complete()
        found: dict[str, Tensor] = {}
        file_of: dict[str, str] = {}
        for file in self.files:
            tensors = _tensors_of(file)
            twice = next((name for name in tensors if name in file_of), None)
            if twice is not None:
                raise InputError(
                    f"{self.path} has the tensor {twice} in both {file_of[twice]} and {file.name}: remove the file "
                    "that does not belong to the model, or download it again into an empty folder."
                )
            found.update(tensors)
            file_of.update(dict.fromkeys(tensors, file.name))
        return found

    def _index(self) -> dict[str, str]:
        """The file of each tensor; empty without an index."""
        index = self.path / _INDEX
        if not index.is_file():
            return {}
        try:
            named = json.loads(index.read_bytes())["weight_map"]
            return {str(tensor): str(file) for tensor, file in named.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InputError(f"{index} is broken: download the model again.") from error

    # Which model it is ---------------------------------------------------------------------------

    @property
    def fingerprint(self) -> str:
        """SHA-256 (64 hex digits) over config.json, the head's tokens, and each safetensors file's name, size, header
        and evenly spaced samples, which distinguish models whose files differ in nothing else, such as fine-tunes."""
        digest = hashlib.sha256()
        try:
            digest.update((self.path / _CONFIG).read_bytes())
            if (self.path / HEAD_TOKENS).exists():
                digest.update((self.path / HEAD_TOKENS).read_bytes())
            for file in sorted(self.path.glob("*.safetensors")):
                digest.update(f"\0{file.name}\0{file.stat().st_size}\0".encode())
                _add_samples(digest.update, file)
        except OSError as error:
            raise InputError(
                f"{self.path} can't be read ({error.strerror}): name a folder with config.json and model*.safetensors."
            ) from error
        return digest.hexdigest()


# Parts of a config --------------------------------------------------------------------------------


def stated_positions(config: Mapping[str, Any]) -> int | None:
    """The most positions, by any of the names in use; None if a config.json states none.

    mlx-lm's own arguments leave this out for some architectures, and it may stand with the text model's part.
    """
    text = config.get("text_config")
    parts = [config, text if is_object(text) else getattr(text, "__dict__", {})]
    found = [part[name] for part in parts for name in _POSITIONS if isinstance(part.get(name), int)]
    return min((number for number in found if number > 1), default=None)


def stated_shape(config: Mapping[str, Any]) -> TargetShape | None:
    """The shape that a config.json states, perhaps with the text model's part; None if it states none."""
    found = [_first(config, names) for names in (_LAYERS, _WIDTHS, _VOCABULARIES)]
    known = [number for number in found if number is not None]
    return TargetShape(*known) if len(known) == len(found) else None


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    parts = [part for part in (config.get("text_config"), config) if is_object(part)]
    values = (part.get(name) for part in parts for name in names)
    return next((value for value in values if type(value) is int and value > 0), None)


# Parts of a safetensors file ----------------------------------------------------------------------


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int] = (0, 0)


def _tensors_of(file: Path) -> dict[str, Tensor]:
    """Every tensor of one file, by name. Raises InputError if it is damaged or cut."""
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = opened.read(min(length, _MOST_HEADER))
        if length.to_bytes(8, "little") == _POINTER:
            raise InputError(f"{file} is a pointer of Git LFS, not the file itself: run `git lfs pull` in its folder.")
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        known = msgspec.convert(entries, dict[str, _Entry])
    except OSError as error:
        raise InputError(f"{file} can't be read ({error.strerror}): check its permissions.") from error
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{file} has no whole header: download it again.") from error
    if any(number < 0 for entry in known.values() for number in entry.shape):
        raise InputError(f"{file} states a tensor of negative size: download it again.")
    whole = 8 + length + max((entry.data_offsets[1] for entry in known.values()), default=0)
    if file.stat().st_size < whole:
        raise InputError(f"{file} is cut: it has {file.stat().st_size:,} of {whole:,} bytes. Download it again.")
    return {name: Tensor(entry.dtype, entry.shape) for name, entry in known.items()}


def _stored(tensor: Tensor) -> int:
    """Bytes in the file."""
    return tensor.elements * _bits(tensor) // 8


def _bits(tensor: Tensor) -> int:
    """Of an element in the file."""
    bits = _BITS.match(tensor.type)
    return int(bits[1]) if bits else 8


def _add_samples(add: Callable[[bytes], object], path: Path) -> None:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        add(file.read(min(length, _MOST_HEADER)))
        begin, end = file.tell(), path.stat().st_size
        for sample in range(_SAMPLES):
            file.seek(begin + max(0, end - begin - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
            add(file.read(_SAMPLE_BYTES))


KvBits: TypeAlias = Literal[16, 8, 4]
UNQUANTIZED: KvBits = 16
"""As the model computes them, whatever its element type."""


def kv_fingerprint(folder: Path, bits: KvBits) -> str:
    """Of keys and values that fit together: the model's fingerprint, and the bits if they are quantized."""
    model = ModelFolder(folder).fingerprint
    return model if bits == UNQUANTIZED else f"{model} in {bits} bits"
