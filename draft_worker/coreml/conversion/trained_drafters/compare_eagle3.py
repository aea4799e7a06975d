"""What an EAGLE-3 drafter and its package compute of the same text."""

from collections.abc import Iterator

import mlx.core as mx
import numpy as np

from draft_worker.conditioned.runner import Wave
from draft_worker.coreml.conversion.trained_drafters.agreement import Comparison, Pair
from draft_worker.coreml.conversion.trained_drafters.target_features import TargetFeatures
from draft_worker.coreml.converted import Converted
from draft_worker.coreml.runtime.backends.runtimes import ExecutorRuntime
from draft_worker.coreml.runtime.conditioned_runner import PackageRunner
from draft_worker.drafters.eagle3 import Eagle3


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
