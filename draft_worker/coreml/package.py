"""What a converted model's folder holds and says of itself. Knows no weights and no graph."""

from pathlib import Path

import msgspec

from protocol.contracts.conversion import FOLDER_MODEL, FORMAT, CacheKind, WeightKind
from protocol.errors import InputError

MODEL = FOLDER_MODEL
HOST = "host.safetensors"
METADATA_KEY = "launch_pipeline"


class DecoderShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sizes of a decoder, as its graph and its host need them."""

    architecture: str
    layers: int
    hidden: int
    heads: int
    key_heads: int
    """Heads of keys and of values; each serves heads / key_heads query heads."""
    head: int
    """Size of one head."""
    vocabulary: int
    positions: int
    """The most positions the model was trained for."""
    epsilon: float
    """Of the RMS norms."""


class Package(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The metadata of a package, kept inside it."""

    source: str
    """Folder or id that it was converted from."""
    shape: DecoderShape
    widths: tuple[int, ...]
    """Tokens that one call evaluates, ascending; one function each."""
    context: int
    """KV slots."""
    cache: CacheKind
    weights: WeightKind
    outputs: tuple[int, ...]
    """Rows of the vocabulary in each of the outputs logits_0, logits_1, ..."""
    model: str
    """Fingerprint of the parameters, as `Checkpoint.fingerprint` makes it; the host's file carries it too."""
    tokenizer: str
    """Fingerprint of what the token ids mean; empty if the source has no tokenizer."""
    interleaved: bool = False
    """Whether a head's features stand in another order than in the source (pairs brought to halves)."""
    version: str = ""
    """Of the launch-pipeline that made it."""
    format: int = FORMAT

    def function(self, width: int) -> str:
        """Name of the function for this width."""
        return f"width_{width}"

    @property
    def cache_shape(self) -> tuple[int, int, int, int]:
        """(2 layers, key heads, slots, head): keys of every layer, then values of every layer."""
        return (2 * self.shape.layers, self.shape.key_heads, self.context, self.shape.head)

    def input_shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        """Inputs of the function for `width`, but for the cache, which is one more input or a state: `kv`."""
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
        """From the user-defined metadata of the package at `path`.

        Raises InputError if it is not one of ours or of another version's form.
        """
        try:
            package = msgspec.json.decode(metadata[METADATA_KEY], type=cls)
        except KeyError as error:
            raise InputError(
                f"{path} was not made by launch-pipeline: convert its model with `launch-pipeline convert`."
            ) from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InputError(
                f"{path} says things of itself that this version can't read ({error}): convert its model again."
            ) from error
        if package.format != FORMAT or not package.widths or min(package.widths) < 1 or package.context < 1:
            raise InputError(f"{path} is of another version's form: convert its model again.")
        return package
