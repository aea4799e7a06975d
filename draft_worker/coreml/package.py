"""The files and the metadata of a converted model's folder. Knows no weights and no graph."""

from pathlib import Path

import msgspec

from protocol.contracts.conversion import FOLDER_MODEL, FORMAT, CacheKind, WeightKind
from protocol.errors import InputError

MODEL = FOLDER_MODEL
HOST = "host.safetensors"
METADATA_KEY = "launch_pipeline"


class DecoderShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sizes of a decoder that its graph and its host need."""

    architecture: str
    layers: int
    hidden: int
    heads: int
    key_heads: int
    """Key heads, and as many value heads; heads / key_heads query heads share one."""
    head: int
    """Size of one head."""
    vocabulary: int
    positions: int
    """Most positions that the model was trained for."""
    epsilon: float
    """Of the RMS norms."""


class Package(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The metadata inside a package."""

    source: str
    """Folder or id of the converted model."""
    shape: DecoderShape
    widths: tuple[int, ...]
    """Tokens of one call, ascending. Each width has its own function."""
    context: int
    """KV slots."""
    cache: CacheKind
    weights: WeightKind
    outputs: tuple[int, ...]
    """Rows of the head in each of the outputs logits_0, logits_1, ... If there are fewer rows than tokens, the host's
    file names their tokens."""
    model: str
    """`Checkpoint.fingerprint` of the parameters; the host's file states it too."""
    tokenizer: str
    """Fingerprint of the tokenizer; empty if the source has none."""
    interleaved: bool = False
    """Whether the features of a head are reordered, from interleaved pairs to halves."""
    version: str = ""
    """Version of launch-pipeline that made the package."""
    format: int = FORMAT

    @property
    def head_rows(self) -> int:
        """The length of a token's logits."""
        return sum(self.outputs)

    def function(self, width: int) -> str:
        """Name of the function for `width`."""
        return f"width_{width}"

    @property
    def cache_shape(self) -> tuple[int, int, int, int]:
        """(2 layers, key heads, slots, head): keys of every layer, then values of every layer."""
        return (2 * self.shape.layers, self.shape.key_heads, self.context, self.shape.head)

    def input_shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        """Inputs of the function for `width`, without the cache `kv`, which is an input or a state."""
        inputs: dict[str, tuple[int, ...]] = {
            "x": (1, self.shape.hidden, 1, width),
            "cos": (1, 1, self.shape.head, width),
            "sin": (1, 1, self.shape.head, width),
            "mask": (1, 1, width, self.context + width),
        }
        return inputs if self.cache == "io" else inputs | {"begin": (4,), "end": (4,)}

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, metadata: dict[str, str], path: Path) -> "Package":
        """The package at `path`, from its user-defined metadata.

        Raises InputError unless this version of launch-pipeline can read the metadata.
        """
        try:
            package = msgspec.json.decode(metadata[METADATA_KEY], type=cls)
        except KeyError as error:
            raise InputError(
                f"{path} was not made by launch-pipeline: convert its model with `launch-pipeline convert`."
            ) from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InputError(
                f"{path} has metadata that this version can't read ({error}): convert its model again."
            ) from error
        if package.format != FORMAT or not package.widths or min(package.widths) < 1 or package.context < 1:
            raise InputError(f"{path} has another version's format: convert its model again.")
        return package
