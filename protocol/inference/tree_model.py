"""Evaluates token trees with a stock mlx-lm model in one forward. Knows no messages, sampling or time.

The model's code is unchanged: each attention's rope is wrapped so that it takes a position per token, and the cache
that the model gets returns the tree's mask.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import dequantize_model, load_model

from protocol.errors import InputError
from protocol.inference.joint_forward import ForwardPart, can_join, evaluate_together
from protocol.inference.layer_cache import ForwardShape
from protocol.inference.processor import spare_compiler
from protocol.inference.slots import PREFIX
from protocol.inference.tree_sequence import TreeSequence
from protocol.kv.arena_header import ArenaLayout
from protocol.messages.base import MAX_CONTEXT

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


class TreeModel:
    """An mlx-lm model whose sequences evaluate token trees. Sequences are independent of one another.

    `vocabulary` is the width of its logits, `context` its most positions, `layout` that of an arena for so many
    positions, or None if no arena can hold its KV.
    Raises InputError for a model whose attention or caches can't hold a tree.
    """

    def __init__(self, model: nn.Module, folder: Path = Path()) -> None:
        self.folder = folder
        self.network: Any = model
        arguments: Any = model.args
        self.architecture = str(arguments.model_type)
        self.context = self._known_context(getattr(arguments, "max_position_embeddings", None))
        self._require_layer_caches()
        for attention in self._attentions():
            if not isinstance(attention.rope, PositionedRope):
                attention.rope = PositionedRope(attention.rope)
        self.vocabulary, self.layout = self._validate_tree()
        self.joins = self._validate_joint()
        """One forward can evaluate several sequences."""

    @classmethod
    def load(cls, folder: Path, division: Division | None = None) -> Self:
        """The model in a folder of config.json and model*.safetensors; code in the folder is never run.

        With `division`, this process's share of it.
        """
        try:
            model, _ = load_model(folder, lazy=True, trust_remote_code=False)
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
        return cls(model, folder)

    def sequence(self) -> "TreeSequence":
        """A new, empty sequence."""
        return TreeSequence(self.network)

    def evaluate_together(self, parts: Sequence[ForwardPart]) -> list[mx.array]:
        """(L, V) logits of each part, not yet computed: in one forward, where this architecture allows it."""
        if len(parts) == 1 or not self.joins:
            return [part.sequence.evaluate(part.tokens, part.parents) for part in parts]
        return evaluate_together(self.network, parts)

    def _attentions(self) -> Iterator[Any]:
        for layer in self.network.layers:
            attention = getattr(layer, "self_attn", None)
            if not callable(getattr(attention, "rope", None)):
                raise self._refusal("its attention has no rotary positions")
            yield attention

    def _require_layer_caches(self) -> None:
        try:
            TreeSequence(self.network)
        except LookupError as error:
            raise self._refusal(str(error)) from error

    def _known_context(self, stated: object) -> int:
        if not isinstance(stated, int) or stated < 2:
            raise self._refusal("its config.json states no max_position_embeddings")
        return min(stated, MAX_CONTEXT)

    def _validate_tree(self) -> tuple[int, ArenaLayout | None]:
        """Compare a fork of three tokens with its two paths; the width of the logits and the KV's layout.

        An architecture may use positions or masks in other ways. Such a model is refused: its logits would be wrong.
        """
        try:
            sequence = self.sequence()
            fork = sequence.evaluate((0, 1, 2), (PREFIX, 0, 0))
            for row, token in ((1, 1), (2, 2)):
                path = self.network(mx.array([[0, token]]), cache=make_prompt_cache(self.network))[0, -1]
                deviation = mx.abs(fork[row] - path).mean() / mx.maximum(mx.std(path), 1e-6)
                if not (deviation < _TOLERANCE).item():
                    raise self._refusal("a tree gives other logits than its paths")
        except (TypeError, ValueError, AttributeError) as error:
            raise self._refusal(f"it uses positions or masks in its own way: {_reason(error)}") from error
        return fork.shape[-1], sequence.layout(self.context)

    def _validate_joint(self) -> bool:
        """Compare a joint forward of two forks with a forward of one. If it fails, sequences are evaluated in turns."""
        if not can_join(self._attentions()):
            return False
        fork = (0, 1, 2), (PREFIX, 0, 0)
        alone = self.sequence().evaluate(*fork)
        # One forward after the other: ranks that share a model must run them in the same order.
        mx.eval(alone)
        try:
            joint = evaluate_together(self.network, [ForwardPart(self.sequence(), *fork) for _ in range(2)])
            mx.eval(joint)
        except (TypeError, ValueError, AttributeError):
            return False
        most = _TOLERANCE * mx.std(alone)
        return all((mx.abs(logits - alone).mean() < most).item() for logits in joint)

    def _refusal(self, reason: str) -> InputError:
        return InputError(
            f"The model in {self.folder} ({self.architecture}) can't verify token trees ({reason}): "
            "choose a Llama, Qwen2, Qwen3 or similar model with full attention."
        )


class PositionedRope(nn.Module):
    """A rope that also takes the positions of a `ForwardShape`: each token becomes a batch row of its own,
    since `mx.fast.rope` accepts an offset per batch row."""

    def __init__(self, inner: Callable[..., mx.array]) -> None:
        super().__init__()
        self.inner = inner

    def __call__(self, x: mx.array, offset: "int | mx.array | ForwardShape" = 0) -> mx.array:
        if not isinstance(offset, ForwardShape):
            return self.inner(x, offset=offset)
        return self.inner(x.transpose(2, 1, 0, 3), offset=offset.positions).transpose(2, 1, 0, 3)


def _reason(error: Exception) -> str:
    """The first line of an error, short enough for a sentence."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:200].rstrip(".")
