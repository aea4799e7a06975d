"""A drafter's config.json and tensor headers, read with checks: what is missing or absurd gets a sentence."""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from protocol.contracts.model_folder import ModelFolder, Tensor, stored_head_tokens
from protocol.errors import InputError
from protocol.json_values import is_object

_Config = TypeVar("_Config")
Size = Annotated[int, Meta(ge=1, le=1 << 20)]
Count = Annotated[int, Meta(ge=1, le=1024)]
LayerIds = Annotated[tuple[Annotated[int, Meta(ge=-1, le=1024)], ...], Meta(min_length=1, max_length=32)]
UNUSED = ("verifier_lm_head", "verifier_norm", "t2d", "rotary_emb")
"""The first parts of names of tensors that speculators keeps of the target, or that follow from other tensors."""
SPECULATORS = "speculators_model_type"
_MOST_POSITIONS = 1 << 20
"""`protocol.messages.base.MAX_CONTEXT`, which this layer can't import."""


class DecoderConfig(msgspec.Struct, kw_only=True):
    """The fields about decoder layers, as Transformers names them."""

    hidden_size: Size
    intermediate_size: Size
    vocab_size: Size
    num_attention_heads: Count
    num_key_value_heads: Count | None = None
    head_dim: Annotated[int, Meta(ge=2, le=4096)] | None = None
    hidden_act: Literal["silu"] = "silu"
    rms_norm_eps: Annotated[float, Meta(gt=0, lt=1)] = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    max_position_embeddings: Annotated[int, Meta(ge=2)] = _MOST_POSITIONS

    @property
    def kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_width(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads


class DrafterCheckpoint(NamedTuple):
    folder: Path
    name: str
    """What the folder is said to hold, for sentences."""
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @classmethod
    def read(cls, folder: Path, name: str, config: dict[str, Any]) -> "DrafterCheckpoint":
        """Raises InputError for damaged weights."""
        return cls(folder, name, config, ModelFolder(folder, "*.safetensors").tensors)

    def decoded(self, form: type[_Config], config: Mapping[str, Any] | None = None) -> _Config:
        """The fields of `config`, by default the whole one, as a struct. A field that is null counts as left out."""
        stated = {name: value for name, value in (config or self.config).items() if value is not None}
        try:
            return msgspec.convert(stated, form)
        except (msgspec.ValidationError, ValueError) as error:
            reason, _, place = str(error).partition(" - at `$.")
            name = place.rstrip("`").split(".")[0].split("[")[0]
            field = f"states {name} {stated[name]!r:.60}, which" if name in stated else "is incomplete or"
            raise self.wrong(f"its config.json {field} does not fit ({reason.replace(' | null', '')})") from error

    def rope(self, layer: DecoderConfig) -> tuple[float, dict[str, Any] | None]:
        """Base and scaling of rotary positions; None: they are not scaled.

        Newer files have both in `rope_parameters`. Some state them by kind of layer: all layers then rotate as the
        sliding ones (speculators: models/utils.py). Positions in three parts are one part for text.
        """
        stated = layer.rope_parameters or layer.rope_scaling or {}
        sliding = stated.get("sliding_attention")
        stated = sliding if is_object(sliding) else stated
        base = stated.get("rope_theta", layer.rope_theta)
        if not isinstance(base, int | float) or not 0 < base < 1e12:
            raise self.wrong(f"its config.json states a rotary embedding of the base {base!r:.60}")
        kind = stated.get("rope_type", stated.get("type", "default"))
        plain = kind is None or kind == "default" or "mrope_section" in stated
        return float(base), None if plain else {name: each for name, each in stated.items() if name != "rope_theta"}

    def decoder(self, layer: DecoderConfig, layers: int, outputs: tuple[int, ...], output_width: int) -> dict[str, Any]:
        """The fields of a `DecoderForm`."""
        heads, size = layer.num_attention_heads, layer.head_width
        if heads % layer.kv_heads or size < 2 or size % 2:
            raise self.wrong(f"{heads} heads of {size} numbers don't fit {layer.kv_heads} KV heads")
        base, scaling = self.rope(layer)
        return {
            "outputs": outputs,
            "output_width": output_width,
            "width": layer.hidden_size,
            "layers": layers,
            "heads": heads,
            "kv_heads": layer.kv_heads,
            "head_width": size,
            "inner": layer.intermediate_size,
            "vocabulary": layer.vocab_size,
            "norm_epsilon": layer.rms_norm_eps,
            "rope_base": base,
            "rope_scaling": scaling,
            "positions": min(layer.max_position_embeddings, _MOST_POSITIONS),
        }

    @property
    def plainly_named(self) -> "DrafterCheckpoint":
        """The same with the tensors that some programs name as parts of a `model`."""
        return self._replace(tensors={name.removeprefix("model."): each for name, each in self.tensors.items()})

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
        tensor = self.tensors[name]
        if f"{name.removesuffix('weight')}scales" not in self.tensors or tensor.type != "U32":
            return tensor.shape
        if "quantization" not in self.config:
            raise self.wrong(f"its tensor {name} is quantised, and its config.json does not say how")
        return (*tensor.shape[:-1], tensor.shape[-1] * 32 // self.decoded(_Quantized).quantization.bits)

    def require(self, name: str, shape: tuple[int, ...]) -> None:
        found = self.shape(name)
        if found != shape:
            raise self.wrong(f"its tensor {name} has the shape {found}, and its config.json says {shape}")

    def recordable(self, outputs: tuple[int, ...], layers: int | None) -> tuple[int, ...]:
        """Outputs of a target of so many layers, counted from 0, that it can record."""
        if any(later <= earlier for earlier, later in pairwise(outputs)):
            raise self.wrong(f"the target's outputs that it reads, {outputs}, are not in ascending order")
        if outputs[0] < 0:
            raise self.wrong("it reads the target's embedding as a state, which no target records")
        if layers is not None and outputs[-1] >= layers:
            raise self.wrong(f"it reads the outputs {outputs}, counted from 0, of a target of {layers} layers")
        return outputs

    def drafted(self, stated: int | None, width: int, vocabulary: int) -> int | None:
        """Tokens of a reduced head, which a table d2t maps to the target's; None: all. `stated`: by config.json."""
        own = stated or vocabulary
        if own > vocabulary:
            raise self.wrong(f"its config.json says that it drafts {own:,} of {vocabulary:,} tokens")
        if self.has("lm_head.weight"):
            self.require("lm_head.weight", (own, width))
        if own == vocabulary:
            return None
        if not self.has("lm_head.weight"):
            raise self.wrong(f"it drafts {own:,} of {vocabulary:,} tokens and has no head of its own")
        self.require("d2t", (own,))
        return own

    def head_tokens(self) -> int | None:
        """How many tokens our own file beside the weights lets it draft; None without the file: all."""
        try:
            tokens = stored_head_tokens(self.folder)
            return None if tokens is None else len(tokens)
        except (ValueError, TypeError) as error:
            raise self.wrong(str(error)) from error

    def wrong(self, reason: str) -> InputError:
        return damaged(self.folder, self.name, reason)


class _Quantization(msgspec.Struct):
    bits: Annotated[int, Meta(ge=1, le=32)] = 4


class _Quantized(msgspec.Struct):
    quantization: _Quantization


def damaged(folder: Path, name: str, reason: str) -> InputError:
    """`reason`: half a sentence."""
    return InputError(f"{folder} is said to hold {name}, but {reason}: download it again, or choose another draft.")
