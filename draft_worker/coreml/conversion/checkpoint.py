"""An mlx-lm checkpoint as plain arrays and sizes. Knows mlx-lm's names, not Core ML."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import llama, qwen2, qwen3
from mlx_lm.utils import dequantize_model, load_model

from draft_worker.coreml.arrays import Half
from draft_worker.coreml.package import DecoderShape
from draft_worker.coreml.rotation import Rotation, separate_halves
from draft_worker.head_tokens import HeadTokens, read_head_tokens
from protocol.errors import InputError

_KNOWN = (llama.Model, qwen2.Model, qwen3.Model)


class Checkpoint:
    """A Llama, Qwen2 or Qwen3 decoder; quantised weights are dequantised by `mx.dequantize`.

    `network`: a loaded mlx-lm model. `head_tokens`: the tokens of the head if it has only some. Raises InputError for
    any other architecture.
    """

    def __init__(self, network: Any, folder: Path = Path(), head_tokens: HeadTokens | None = None) -> None:
        if not isinstance(network, _KNOWN):
            raise _refusal(folder, f"its architecture is {type(network).__module__.split('.')[-1]}")
        self.folder = folder
        self.shape = _shape(network, folder)
        self.head_tokens = head_tokens
        self._rope: Any = network.layers[0].self_attn.rope
        self.interleaved = bool(getattr(self._rope, "traditional", False))
        """Whether rope pairs features (0, 1), (2, 3), ...; `half` reorders them to pairs (i, i + head / 2)."""
        self._arrays: dict[str, mx.array] = dict(tree_flatten(dequantize_model(network).parameters()))

    @classmethod
    def load(cls, folder: Path) -> "Checkpoint":
        """The model in a folder of config.json and model*.safetensors; code in the folder is never run."""
        try:
            network: Any = load_model(folder, lazy=True, trust_remote_code=False)[0]
        except FileNotFoundError as error:
            raise InputError(
                f"{folder} holds no model ({error}): pass a folder with config.json and model*.safetensors."
            ) from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200].rstrip(".")
            raise InputError(f"The model in {folder} can't be loaded ({reason}): download it again.") from error
        return cls(network, folder, read_head_tokens(folder, network.args.vocab_size))

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def half(self, name: str) -> Half:
        """A parameter by mlx-lm's name, rounded to fp16. Raises InputError for numbers beyond fp16's range."""
        with np.errstate(over="ignore"):
            array = np.array(self._arrays[name].astype(mx.float32)).astype(np.float16)
        if not np.isfinite(array).all():
            raise InputError(
                f"{name} of {self.folder} has numbers beyond fp16's range, the Neural Engine's only type: "
                "use the MLX draft engine for this model."
            )
        if self.interleaved and ".self_attn." in name and name.split(".")[-2] in ("q_proj", "k_proj"):
            return separate_halves(array, self.shape.head)
        return array

    def head(self) -> tuple[str, Half]:
        """The name of the head's parameter, and its rows in the order of the logits."""
        name = "lm_head.weight" if "lm_head.weight" in self else "model.embed_tokens.weight"
        rows = self.half(name)
        return name, rows if self.head_tokens is None else rows[self.head_tokens]

    @property
    def head_rows(self) -> int:
        return self.shape.vocabulary if self.head_tokens is None else len(self.head_tokens)

    def rotation(self, context: int) -> Rotation:
        """The rotations that mlx-lm's rope applies at the positions below `context`."""
        return Rotation.measure(self._rope, self.shape.head, context)

    def fingerprint(self) -> str:
        """SHA-256 (64 hex digits) over every parameter's name and fp16 bytes, the rotations and the head's tokens."""
        digest = hashlib.sha256()
        for name, array in self._halves():
            digest.update(name.encode())
            digest.update(np.ascontiguousarray(array).data)
        for table in self.rotation(min(self.shape.positions, 64)):
            digest.update(table.data)
        if self.head_tokens is not None:
            digest.update(self.head_tokens.data)
        return digest.hexdigest()

    def _halves(self) -> Iterator[tuple[str, Half]]:
        for name in sorted(self._arrays):
            yield name, self.half(name)


def _shape(network: Any, folder: Path) -> DecoderShape:
    arguments, attention = network.args, network.layers[0].self_attn
    if any(getattr(layer, "use_sliding", False) for layer in network.layers):
        raise _refusal(folder, "it attends through sliding windows")
    if arguments.num_attention_heads % arguments.num_key_value_heads:
        raise _refusal(folder, "its query heads are no multiple of its key heads")
    positions = arguments.max_position_embeddings
    if not positions:
        raise _refusal(folder, "its config.json states no max_position_embeddings")
    return DecoderShape(
        architecture=arguments.model_type,
        layers=arguments.num_hidden_layers,
        hidden=arguments.hidden_size,
        heads=attention.n_heads,
        key_heads=attention.n_kv_heads,
        head=attention.q_proj.weight.shape[0] // attention.n_heads,
        vocabulary=arguments.vocab_size,
        positions=positions,
        epsilon=arguments.rms_norm_eps,
    )


def _refusal(folder: Path, reason: str) -> InputError:
    return InputError(
        f"The model in {folder} can't be converted ({reason}): "
        "choose a Llama, Qwen2 or Qwen3 with full attention, or use the MLX draft engine."
    )
