"""Compares each function of a trained drafter's package with the drafter in MLX, on the target's own features.

The executor stands for the device: what is compared is the graph and its rounding to fp16. The features are recorded
over a text, which also tells how large they are.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import dequantize_model, load_model, load_tokenizer

from draft_worker.conditioned.runner import Wave
from draft_worker.coreml.arrays import Array, Single
from draft_worker.coreml.converted import Converted
from draft_worker.coreml.runtime.backends.runtimes import ExecutorRuntime
from draft_worker.coreml.runtime.block_runner import PackageBlockRunner, PackageContext
from draft_worker.coreml.runtime.conditioned_runner import PackageRunner
from draft_worker.drafters.block_forward import Block, BlockRows, MlxBlockRunner
from draft_worker.drafters.block_kv import BlockKv
from draft_worker.drafters.eagle3 import Eagle3
from protocol.contracts.coreml.conversion import WeightKind
from protocol.errors import InputError
from protocol.inference.tap import proved_tap
from protocol.messages.features import FeatureForm

_LIMITS: Mapping[WeightKind, float] = {"fp16": 0.05, "int8": 0.25, "4bit": 1.0}
"""Largest deviation that rounding explains, of activations and of weights in fewer bits. Unrelated results have 1.4."""


class Pair(NamedTuple):
    """Results of a function of the package, and of the drafter in MLX."""

    function: str
    got: Array
    expected: Array

    @property
    def deviation(self) -> float:
        """Root mean square of the differences, in standard deviations of the expected results."""
        difference = self.got.astype(np.float64) - self.expected
        deviation = np.sqrt(np.mean(np.square(difference))) / max(float(np.std(self.expected)), 1e-12)
        return float(deviation) if np.isfinite(deviation) else np.inf


Comparison: TypeAlias = Callable[[Converted], Iterator[Pair]]


def require_agreement(folder: Path, drafter: Path, compare: Comparison) -> None:
    """Raises InputError if a function of the package in `folder` does not compute what `drafter` does."""
    converted = Converted.open(folder)
    limit = _LIMITS[converted.package.weights]
    for pair in compare(converted):
        if not pair.deviation <= limit:
            raise InputError(
                f"The package made of {drafter} was discarded: its function {pair.function} deviates from the drafter "
                f"by {pair.deviation:.2g} standard deviations, and {limit} is the most that rounding to "
                f"{converted.package.weights} explains. Use the drafter as it is, without Core ML."
            )


_MOST = 96
"""Tokens of the text."""
_TEXT = (
    "The largest numbers in the states of a language model stand at its first token, at line breaks and at full stops. "
    "They are hundreds of times larger than the others, and they are the same for every text.\n\n"
    "def largest(states):\n    return max(abs(number) for row in states for number in row)\n\n"
    "1. How tall is Mount Everest?\nIt is 8,849 metres tall; “Chomolungma” is its Tibetan name.\n"
    "2. Wie heißt das auf Deutsch?\nDas ist der höchste Berg der Erde.\n"
)


class TargetFeatures(NamedTuple):
    tokens: list[int]
    rows: Single
    """(tokens, outputs * width): behind each token."""

    @property
    def largest(self) -> float:
        return float(np.abs(self.rows).max())


def target_features(folder: Path, form: FeatureForm) -> TargetFeatures:
    """What the target in `folder` leaves of a text for a drafter of this form. Raises InputError if it can't be had."""
    try:
        loaded: Any = load_model(folder, lazy=True, trust_remote_code=False)
        tokens: list[int] = list(load_tokenizer(folder).encode(_TEXT))[:_MOST]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise InputError(f"The target in {folder} can't be loaded ({str(error)[:200]}): download it again.") from error
    network = loaded[0]
    if mx.default_device() == mx.Device(mx.cpu):
        # A processor has fast kernels for float32 alone.
        network = dequantize_model(network)
        network.set_dtype(mx.float32)
    tap = proved_tap(network)
    lack = "its hidden states can't be recorded" if tap is None else tap.taps.lack(form)
    if tap is None or lack:
        raise InputError(f"The target in {folder} does not fit the drafter ({lack}): pass the drafter's own target.")
    tap.record(form.outputs)
    mx.eval(network(mx.array([tokens]), cache=make_prompt_cache(network)))
    recorded = tap.take()
    assert recorded is not None, "every forward is recorded"
    rows = np.array(
        recorded.rows.view(mx.bfloat16).astype(mx.float32)
        if recorded.rows.dtype == mx.uint16
        else recorded.rows.astype(mx.float32)
    )
    if not np.isfinite(rows).all():
        raise InputError(f"The states of the target in {folder} are not finite: download it again.")
    return TargetFeatures(tokens, rows)


_BEHIND = 8
"""Blocks begin at so many of the last tokens."""


def block_comparison(mlx: MlxBlockRunner, features: TargetFeatures) -> Comparison:
    def compare(converted: Converted) -> Iterator[Pair]:
        package = PackageBlockRunner(converted, ExecutorRuntime(converted))
        conditioning = converted.package.conditioning
        assert conditioning is not None
        # The tokens leave room for the last block.
        tokens = features.tokens[: converted.package.context - mlx.form.masks]
        known = len(tokens) - _BEHIND
        contexts = [mlx.open(), package.open()]
        for context in contexts:
            context.feed(0, features.rows[:known])
            context.read_all()
        ours, theirs = (context.store for context in contexts)
        assert isinstance(ours, BlockKv)
        assert isinstance(theirs, PackageContext)
        yield Pair(conditioning.function, theirs.kv[:, :, :known], _stacked(ours))
        blocks = [Block([tokens[position]], position) for position in range(known, len(tokens))]
        expected = mlx.forward(contexts[0], blocks)
        for width in converted.package.widths:
            # As many blocks as fill this function, and no wider one.
            count = min(len(blocks), width // (1 + mlx.form.masks))
            found = package.forward(contexts[1], blocks[:count])
            yield Pair(converted.package.function(width), _logits(found), _logits(expected[:count]))
            if conditioning.state != "none":
                yield Pair(converted.package.function(width), _states(found), _states(expected[:count]))

    return compare


def _stacked(kv: BlockKv) -> Array:
    """In the order of a package's cache."""
    layers = kv.keys_values()
    return np.concatenate([np.array(keys) for keys, _ in layers] + [np.array(values) for _, values in layers])


def _logits(rows: Sequence[BlockRows]) -> Array:
    return np.stack([np.array(each.logits) for each in rows])


def _states(rows: Sequence[BlockRows]) -> Array:
    return np.stack([np.array(each.states) for each in rows])


def eagle3_comparison(network: Eagle3, features: TargetFeatures) -> Comparison:
    def compare(converted: Converted) -> Iterator[Pair]:
        conditioning = converted.package.conditioning
        assert conditioning is not None
        runner = PackageRunner(converted, ExecutorRuntime(converted))
        most = min(len(features.tokens) - 1, runner.open().table.most_committed)
        # The row of a token reads the feature of the token before it.
        tokens, rows = features.tokens[1 : most + 1], features.rows[:most]
        fused = network.fuse(mx.array(rows))
        given = runner.fuse(rows)
        yield Pair(conditioning.function, given, np.array(fused))
        states = network(mx.array([tokens]), fused[None])
        logits = network.logits(states)[0]
        for width in converted.package.widths:
            sequence, found = runner.open(), []
            for begin in range(0, most, width):
                part = slice(begin, begin + width)
                found.append(runner.evaluate(Wave(sequence, tokens[part], [], begin, ()), given[part]))
            left = mx.concatenate(found)
            sequence.close()
            function = converted.package.function(width)
            yield Pair(function, runner.states(left), np.array(states[0]))
            yield Pair(function, np.array(runner.logits(left)), np.array(logits))

    return compare
