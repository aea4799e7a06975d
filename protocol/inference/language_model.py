"""Evaluates token trees with a stock mlx-lm model in one forward. Knows no messages, sampling or time.

The model's code is unchanged: each attention's rope is wrapped so that it takes a position per token, and the cache
that the model gets returns the tree's mask.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import dequantize_model, load_model

from protocol.errors import InputError
from protocol.inference.joint_forward import ForwardPart, can_join, evaluate_together
from protocol.inference.layer_cache import TreePositions
from protocol.inference.processor import spare_compiler
from protocol.inference.slots import PREFIX
from protocol.inference.tree_sequence import TreeSequence
from protocol.kv.arena_header import ArenaLayout
from protocol.messages.base import MAX_CONTEXT, Level

_CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "model_max_length", "max_seq_len", "block_size")
_ROPES = ("rope", "rotary_emb")
"""Names of ropes in mlx-lm's attention."""
_FORK = tuple(range(12)), (PREFIX, *[0] * 11)
"""Tokens and parents. The last one's slot is far from its position: confusing them shows."""
_TOLERANCE = 0.1
"""Largest mean deviation of tree logits from path logits that rounding explains, in standard deviations."""


class Division(Protocol):
    """Divides a network among processes that load their shares at the same time."""

    def divide(self, network: Any) -> None:
        """Reduce the network to this process's share, before weights are read. May raise InputError."""
        ...

    def await_loaded(self) -> None:
        """Return when every process has loaded its share. Uses no GPU."""
        ...


class LanguageModel:
    """An mlx-lm model whose sequences evaluate token trees. Sequences are independent of one another.

    `vocabulary` is the width of its logits, `context` its most positions, `layout` that of an arena for so many
    positions, or None if no arena can hold its KV.
    Raises InputError for a model whose attention or caches can't hold a tree.
    """

    def __init__(self, model: nn.Module, folder: Path = Path(), config: Mapping[str, Any] | None = None) -> None:
        """`config`: the content of config.json; without one, what the model itself keeps of it."""
        self.folder = folder
        self.network: Any = model
        kept = getattr(model, "args", None) or getattr(model, "config", None)
        config = vars(kept) if config is None else config
        self.architecture = str(config["model_type"])
        self.context = stated_context(config)
        self.level: Level = "tree"
        """The trees that one forward can evaluate."""
        self.level_reason = ""
        """Why it is not a higher level; empty at the highest."""
        self._require_layer_caches()
        _let_positions_through(model)
        self.vocabulary, self.layout = self._validate_tree()
        self.joins = self._validate_joint()
        """One forward can evaluate several sequences."""

    @classmethod
    def load(cls, folder: Path, division: Division | None = None) -> Self:
        """The model in a folder of config.json and model*.safetensors; code in the folder is never run.

        With `division`, this process's share of it.
        """
        try:
            model, config = load_model(folder, lazy=True, trust_remote_code=False)
            if mx.default_device() == mx.Device(mx.cpu):
                # A CPU has fast kernels for float32 alone; quantized products are many times slower.
                model = dequantize_model(model)
                model.set_dtype(mx.float32)
                spare_compiler()
            if division is not None:
                division.divide(model)
            mx.eval(model.parameters())
        except FileNotFoundError as error:
            raise InputError(
                f"{folder} holds no model ({error}): name a folder with config.json and model*.safetensors."
            ) from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise InputError(
                f"The model in {folder} can't be loaded ({_reason(error)}): "
                "download it again, or choose an architecture that mlx-lm supports."
            ) from error
        if division is not None:
            division.await_loaded()
        return cls(model, folder, config)

    def sequence(self) -> "TreeSequence":
        """A new, empty sequence."""
        return TreeSequence(self.network)

    def evaluate_together(self, parts: Sequence[ForwardPart]) -> list[mx.array]:
        """(L, V) logits of each part, not yet computed: in one forward, where this architecture allows it."""
        if len(parts) == 1 or not self.joins:
            return [part.sequence.evaluate(part.tokens, part.parents) for part in parts]
        return evaluate_together(self.network, parts)

    def _require_layer_caches(self) -> None:
        try:
            TreeSequence(self.network)
        except LookupError as error:
            raise self._refusal(str(error)) from error

    def _validate_tree(self) -> tuple[int, ArenaLayout | None]:
        """Compare a fork with two of its paths; the width of the logits and the KV's layout.

        An architecture may use positions or masks in other ways. Such a model is refused: its logits would be wrong.
        """
        try:
            sequence = self.sequence()
            fork = sequence.evaluate(*_FORK)
            for row in (1, len(_FORK[0]) - 1):
                path = self.network(mx.array([[0, row]]), cache=make_prompt_cache(self.network))[0, -1]
                deviation = mx.abs(fork[row] - path).mean() / mx.maximum(mx.std(path), 1e-6)
                if not (deviation < _TOLERANCE).item():
                    raise self._refusal("a tree gives other logits than its paths")
        except (TypeError, ValueError, AttributeError) as error:
            raise self._refusal(f"it uses positions or masks in its own way: {_reason(error)}") from error
        return fork.shape[-1], sequence.layout(self.context)

    def _validate_joint(self) -> bool:
        """Compare a joint forward of two forks with a forward of one. If it fails, sequences are evaluated in turns."""
        if not can_join(self.network.modules()):
            return False
        alone = self.sequence().evaluate(*_FORK)
        # One forward after the other: ranks that share a model must run them in the same order.
        mx.eval(alone)
        try:
            joint = evaluate_together(self.network, [ForwardPart(self.sequence(), *_FORK) for _ in range(2)])
            mx.eval(joint)
        except (TypeError, ValueError, AttributeError):
            return False
        most = _TOLERANCE * mx.std(alone)
        return all((mx.abs(logits - alone).mean() < most).item() for logits in joint)

    def _refusal(self, reason: str) -> InputError:
        return InputError(
            f"The model in {self.folder} ({self.architecture}) can't verify token trees ({reason}): "
            "choose a model whose layers are full attention or sliding windows, such as Llama, Qwen3 or Gemma 3."
        )


class PositionedRope(nn.Module):
    """A rope that also takes `TreePositions`: each token becomes a batch row of its own, since `mx.fast.rope` accepts
    an offset per batch row."""

    def __init__(self, inner: Callable[..., mx.array]) -> None:
        super().__init__()
        self.inner = inner

    def __call__(self, x: mx.array, offset: int | mx.array | TreePositions = 0) -> mx.array:
        tree = TreePositions.of(offset, x.shape[2])
        if tree is None:
            return self.inner(x, offset=offset)
        return self.inner(x.transpose(2, 1, 0, 3), offset=tree.positions).transpose(2, 1, 0, 3)


def stated_context(config: Mapping[str, Any]) -> int:
    """The most positions that a config.json states, by any of the names in use; MAX_CONTEXT if it states none.

    mlx-lm's own arguments leave this out for some architectures, and it may stand with the text model's part.
    """
    parts = [config, _fields(config.get("text_config"))]
    found = [part[name] for part in parts for name in _CONTEXT_NAMES if isinstance(part.get(name), int)]
    return min([*(number for number in found if number > 1), MAX_CONTEXT])


def _fields(part: object) -> Mapping[str, Any]:
    if isinstance(part, Mapping):
        return part
    return vars(part) if hasattr(part, "__dict__") else {}


def _let_positions_through(model: nn.Module) -> None:
    for module in model.modules():
        for name in _ROPES:
            rope = getattr(module, name, None)
            if isinstance(rope, nn.Module) and not isinstance(rope, PositionedRope):
                setattr(module, name, PositionedRope(rope))


def _reason(error: Exception) -> str:
    """The first line of an error, short enough for a sentence."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:200].rstrip(".")
