"""What a block drafter and its package compute of the same text."""

from collections.abc import Iterator, Sequence

import numpy as np

from draft_worker.coreml.arrays import Array
from draft_worker.coreml.conversion.trained_drafters.agreement import Comparison, Pair
from draft_worker.coreml.conversion.trained_drafters.target_features import TargetFeatures
from draft_worker.coreml.converted import Converted
from draft_worker.coreml.runtime.backends.runtimes import ExecutorRuntime
from draft_worker.coreml.runtime.block_runner import PackageBlockRunner, PackageContext
from draft_worker.drafters.block_forward import Block, BlockRows, MlxBlockRunner
from draft_worker.drafters.block_kv import BlockKv

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
