"""Evaluates token trees with a stock mlx-lm model in one forward. Knows no messages, sampling or time.

The model's code is unchanged: each attention's rope is wrapped so that it takes a position per token, and the cache
that the model gets returns the tree's mask.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, Protocol, Self, cast

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import CacheList, make_prompt_cache

from protocol.contracts.model_folder import UNQUANTIZED, KvBits, stated_positions
from protocol.errors import InputError
from protocol.inference.device import compute
from protocol.inference.joint_forward import ForwardPart, can_join, evaluate_together
from protocol.inference.latent_attention import let_latents_be_absorbed
from protocol.inference.layer_cache import TreePositions
from protocol.inference.layer_caches.state import FoldingCache
from protocol.inference.narrow_weights import keep_narrow
from protocol.inference.observed_modules import Restore, modules_of, stage
from protocol.inference.quantized_kv import Encodings, deviation, proved_encodings
from protocol.inference.recurrence import let_recurrences_record
from protocol.inference.slots import PREFIX
from protocol.inference.stored_model import load_network, loading, ready_for_processor, reason_of
from protocol.inference.tap import LayerTap, proved_tap
from protocol.inference.tree_sequence import TreeSequence
from protocol.inference.whole_layers import compute_layers_whole
from protocol.messages.base import MAX_CONTEXT, MAX_DEVIATION, Level
from protocol.messages.features import Outputs

_WINDOW_NAMES = ("max_size", "chunk_size")
"""Attributes of mlx-lm's caches that hold a window, in tokens."""


def impossible_windows(caches: Iterable[object]) -> list[object]:
    """What mlx-lm's caches hold as windows that is no whole number above 0. mlx-lm takes it from config.json as it is,
    and a window of 0 tokens gives logits without an error."""
    return [window for window in _windows(caches) if type(window) is not int or window < 1]


def _windows(caches: Iterable[object]) -> Iterator[object]:
    for cache in caches:
        if isinstance(cache, CacheList):
            parts: tuple[object, ...] = vars(cache)["caches"]
            yield from _windows(parts)
        else:
            yield from (getattr(cache, name) for name in _WINDOW_NAMES if hasattr(cache, name))


_ROPES = ("rope", "rotary_emb")
"""Names of ropes in mlx-lm's attention."""
_FORK = tuple(range(12)), (PREFIX, *[0] * 11)
"""Tokens and parents. The last one's slot is far from its position: confusing them shows."""
_ENDS = 1, len(_FORK[0]) - 1
"""Rows of it that are compared; each has its own number as token, and the path 0, itself."""
_LOWER: tuple[Level, ...] = ("chain", "plain")
"""Levels below trees, the best one first."""
_WIDTHS: Mapping[Level, int] = {"tree": 3, "chain": 3, "plain": 1}
"""Tokens of a forward in the proof of a level."""
_TOLERANCE = 0.1
"""Largest mean deviation of tree logits from path logits that rounding explains, in standard deviations."""
_ROUNDING, _LEAST_ROUNDING = 8, 1e-4
"""The same of a row in a forward with others from the row alone: so many times its type's distance from 1 to the next
number, and no less than 1e-4. See docs/log/2026-11-29-rows-of-a-shared-forward.md."""


class Division(Protocol):
    """Divides a network among processes that load their shares at the same time."""

    def divide(self, network: Any) -> None:
        """Reduce the network to this process's share, before weights are read. May raise InputError."""

    def await_loaded(self) -> None:
        """Return when every process has loaded its share. Uses no GPU."""


class LanguageModel:
    """An mlx-lm model whose sequences evaluate token trees, or what its `level` allows of them. Sequences are
    independent of one another.

    `vocabulary` is the width of its logits, `context` its most positions, `layout` that of an arena for so many
    positions, or None if no arena can hold its KV.
    Raises InputError for a model whose logits are wrong at every level.
    """

    def __init__(
        self,
        model: nn.Module,
        folder: Path = Path(),
        config: Mapping[str, Any] | None = None,
        kv_bits: KvBits = UNQUANTIZED,
    ) -> None:
        """`config`: the content of config.json; without one, what the model itself keeps of it."""
        self.folder = folder
        self.network: Any = model
        self.prompt_logits = True
        """A prefill gives logits."""
        self.chains = mx.default_device() != mx.Device(mx.cpu)
        """A forward may begin before the tokens that it takes are read. On a processor that gains nothing: there MLX
        returns from the begin of a forward when most of the one before it is computed."""
        kept = getattr(model, "args", None) or getattr(model, "config", None)
        config = vars(kept) if config is None else config
        self.architecture = str(config["model_type"])
        self.context = stated_context(config)
        self.level: Level
        """The trees that one forward can evaluate."""
        self.level_reason: str
        """Why it is not a higher level; empty at the highest."""
        self.deviation = 0.0
        """The largest of logits at its level from those of mlx-lm's own caches, in standard deviations."""
        self.tap: LayerTap | None = None
        """Records what drafters read; None if that can't be had of this model."""
        self._validate_windows()
        _let_positions_through(model)
        let_recurrences_record(model)
        let_latents_be_absorbed(model)
        compute_layers_whole(model)
        self.level, self.level_reason = self._best_level()
        self._encodings: Encodings = () if kv_bits == UNQUANTIZED else self._quantized(kv_bits)
        sequence = self.sequence()
        self.vocabulary = sequence.evaluate([0], [PREFIX]).shape[-1]
        self.layout = sequence.layout(self.context)
        self.joint_deviation, rounding = self._compare_joint()
        """The largest of rows in a forward with other sequences, from the same rows alone; None if there is no such
        forward."""
        self.joins = self.joint_deviation is not None and self.joint_deviation < _TOLERANCE
        """One forward can evaluate several sequences."""
        self.batch_dependent = self.joins and (self.joint_deviation or 0.0) > rounding
        """Their rows then differ by more than rounding from the same rows alone."""
        self.tap = proved_tap(self.network)
        _name_parts(self.network)
        self.unstage: Restore | None = stage(self.network) if mx.default_device() != mx.Device(mx.cpu) else None
        """Ends staged dispatch; None: forwards are not staged."""

    @classmethod
    def load(cls, folder: Path, division: Division | None = None, kv_bits: KvBits = UNQUANTIZED) -> Self:
        """The model in a folder of config.json and model*.safetensors; code in the folder is never run.

        With `division`, this process's share of it. Its sequences hold keys and values in `kv_bits` bits.
        """
        with loading(folder):
            model, config = load_network(folder)
            ready_for_processor(model)
            if division is not None:
                division.divide(model)
            compute(model.parameters())
            keep_narrow(model)
        if division is not None:
            division.await_loaded()
        return cls(model, folder, config, kv_bits)

    def sequence(self) -> "TreeSequence":
        """A new, empty sequence."""
        return TreeSequence(self.network, self.level, self._encodings, self.tap)

    def lower(self, reason: str) -> bool:
        """Fall to the next lower level, because a forward failed for this `reason`. False, and nothing changes, at the
        lowest one. Sequences that exist keep their level."""
        below = {"tree": _LOWER, "chain": _LOWER[1:], "plain": ()}[self.level]
        if not below:
            return False
        self.level, self.level_reason, self.joins = below[0], f"a forward failed: {reason}", False
        return True

    def record(self, outputs: Outputs) -> None:
        """Record these outputs, which the tap allows, in the forwards of all sequences from now on; none if there are
        none. See `TreeSequence.recorded`."""
        if self.tap is not None:
            self.tap.record(outputs)

    def evaluate_together(self, parts: Sequence[ForwardPart]) -> list[mx.array]:
        """(L, V) logits of each part, which may not be computed yet: in one forward, if this architecture allows it."""
        if len(parts) == 1 or not self.joins:
            return [part.evaluate() for part in parts]
        return evaluate_together(self.network, parts)

    def _validate_windows(self) -> None:
        try:
            impossible = impossible_windows(make_prompt_cache(self.network))
        except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
            raise InputError(
                f"mlx-lm can't make the caches of the model in {self.folder} ({self.architecture}: "
                f"{reason_of(error)}): its config.json may be damaged. Download it again."
            ) from error
        if impossible:
            raise InputError(
                f"The config.json in {self.folder} states a window of {impossible[0]!r} tokens, which must be a whole "
                "number above 0: download the model again, or correct the file."
            )

    def _best_level(self) -> tuple[Level, str]:
        """The best level at which logits equal those of mlx-lm's own caches, token by token, and why not a better one.

        An architecture may use positions, masks or caches in ways that ours don't allow for.
        """
        flaw = next((cache.no_trees for cache in TreeSequence(self.network).caches if cache.no_trees), "")
        flaw = flaw or self._flaw("tree", self._fork_deviations)
        if not flaw:
            return "tree", ""
        worse = ""
        for level in _LOWER:
            worse = self._flaw(level, partial(self._undo_deviations, level))
            if not worse:
                return level, flaw
        raise InputError(
            f"The model in {self.folder} ({self.architecture}) can't be served ({worse}): its files may be damaged, or "
            "mlx-lm's code for it has changed. Download it again, or choose another model."
        )

    def _flaw(self, level: Level, deviations: Callable[[], list[float]]) -> str:
        """Why sequences of this level don't work, as half a sentence; empty if they do."""
        try:
            self.deviation = _largest(deviations())
        except (TypeError, ValueError, AttributeError, LookupError) as error:
            return f"it uses positions, masks or caches in its own way: {reason_of(error)}"
        told = f"by {self.deviation:.2g} standard deviations, and rounding explains {_TOLERANCE}"
        return "" if self.deviation < _TOLERANCE else f"a {level} gives other logits than its tokens one by one, {told}"

    def _fork_deviations(self) -> list[float]:
        """Of two tokens of a fork from their paths."""
        sequence = TreeSequence(self.network)
        folding = any(isinstance(cache, FoldingCache) for cache in sequence.caches)
        fork = sequence.evaluate(*_FORK)
        compute(fork)
        deviations = [deviation(fork[row], self._alone([0, row])[-1]) for row in _ENDS]
        return deviations + self._undo_deviations("tree") if folding else deviations

    def _undo_deviations(self, level: Level) -> list[float]:
        """Of two paths, the first of which is kept in part."""
        sequence, width = TreeSequence(self.network, level), _WIDTHS[level]
        sequence.prefill([0])
        first = sequence.evaluate(range(1, 1 + width), [PREFIX, *range(width - 1)])
        compute(first)
        sequence.keep([0], ())
        second = sequence.evaluate(range(2, 2 + width), [PREFIX, *range(width, 2 * width - 1)])
        compute(second)
        alone = self._alone(range(2 + width))
        return [deviation(*rows) for rows in zip([*first, *second], [*alone[1:-1], *alone[2:]], strict=True)]

    def _alone(self, text: Sequence[int]) -> list[mx.array]:
        """Logits behind each token, by mlx-lm's own caches."""
        stock, logits = make_prompt_cache(self.network), list[mx.array]()
        for token in text:
            logits.append(self.network(mx.array([[token]]), cache=stock)[0, -1])
            # One forward after the other: ranks that share a model must run them in the same order.
            compute(logits[-1])
        return logits

    def _quantized(self, bits: KvBits) -> Encodings:
        encodings = proved_encodings(lambda forms: TreeSequence(self.network, self.level, forms), self.level, bits)
        if not encodings:
            raise InputError(
                f"The KV of {self.folder} ({self.architecture}) can't be held in {bits} bits, because no layer has "
                f"keys and values in whole groups of 32 numbers: leave out --kv-bits."
            )
        return encodings

    def _compare_joint(self) -> tuple[float | None, float]:
        """The largest deviation of rows of a joint forward from each row alone, which has no mask, and what rounding
        explains. The rows: a fork, one behind a dead slot, which a mask hides as it hides padding, and one without a
        mask."""
        if self.level != "tree" or not can_join(self.network.modules()):
            return None, 0.0
        sequences, alone = [self.sequence() for _ in range(3)], list[mx.array]()
        for sequence, token in zip(sequences[1:], _ENDS, strict=True):
            sequence.prefill([0])
            alone.append(sequence.evaluate([token], [PREFIX])[0])
            # One forward after the other: ranks that share a model must run them in the same order.
            compute(alone[-1])
        sequences[1].keep((), ())
        sequences[2].truncate(1)
        forwards = [_FORK, *(((token,), (PREFIX,)) for token in _ENDS)]
        parts = [ForwardPart(sequence, *each) for sequence, each in zip(sequences, forwards, strict=True)]
        try:
            joint = evaluate_together(self.network, parts)
            compute(joint)
        except (TypeError, ValueError, AttributeError, LookupError):
            return None, 0.0
        rows = [*(joint[0][row] for row in _ENDS), joint[1][0], joint[2][0]]
        largest = _largest(deviation(row, same) for row, same in zip(rows, alone * 2, strict=True))
        kinds = {array.dtype for cache in sequences[0].caches for array in cache.arrays} | {rows[0].dtype}
        epsilon = max(mx.finfo(kind).eps for kind in kinds if mx.issubdtype(kind, mx.floating))
        return largest, max(_LEAST_ROUNDING, _ROUNDING * epsilon)


def _largest(deviations: Iterable[float]) -> float:
    """No more than MAX_DEVIATION, which also stands for logits that are no numbers."""
    return max(found if found < MAX_DEVIATION else MAX_DEVIATION for found in deviations)


def stated_context(config: Mapping[str, Any]) -> int:
    """The most positions that a config.json states; MAX_CONTEXT if it states none, or more."""
    return min(stated_positions(config) or MAX_CONTEXT, MAX_CONTEXT)


def _let_positions_through(model: nn.Module) -> None:
    """Let each attention's rope take `TreePositions` too: each token becomes a batch row of its own, since
    `mx.fast.rope` accepts an offset per batch row."""
    found = (getattr(module, name, None) for module in modules_of(model) for name in _ROPES)
    for rope in {id(rope): rope for rope in found if isinstance(rope, nn.Module)}.values():
        _position(rope)


def _position(rope: nn.Module) -> None:
    kind: Any = type(rope)
    inner: Callable[..., mx.array] = kind.__call__

    def call(self: Any, x: mx.array, offset: int | mx.array | TreePositions = 0, **others: Any) -> mx.array:
        # Most offsets of a chain are numbers, and the device waits for every call.
        tree = None if isinstance(offset, int) else TreePositions.of(offset, x.shape[2])
        if tree is None:
            return inner(self, x, offset=offset, **others)
        rows = inner(self, mx.transpose(x, (2, 1, 0, 3)), offset=tree.positions, **others)
        return mx.transpose(rows, (2, 1, 0, 3))

    # Others look a layer's code up by the name of its module.
    rope.__class__ = type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


def _name_parts(network: Any) -> None:
    """MLX keeps a module's parts where Python looks last, behind an error of its own: that takes 1.6 µs a part in
    Python 3.11, and a layer has about 15. So each module gets a class whose properties find them."""
    kinds: dict[tuple[type, tuple[str, ...]], type] = {}
    for module in modules_of(network):
        kind, held = type(module), cast("dict[str, Any]", module)
        parts = tuple(name for name, part in held.items() if isinstance(part, nn.Module) and not hasattr(kind, name))
        if (kind, parts) not in kinds:
            found = {name: property(itemgetter(name)) for name in parts}
            kinds[kind, parts] = type(kind.__name__, (kind,), {"__module__": kind.__module__, **found})
        module.__class__ = kinds[kind, parts]
