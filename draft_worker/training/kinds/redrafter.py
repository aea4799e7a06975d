"""ReDrafter in training: a recurrence over the tokens behind the last one whose state is known.

arXiv 2403.09919, apple/ml-recurrent-drafter: the sum of the cross entropies over several steps. The state of the target
stays the same through all of them, so a stale draft differs only by more steps.
"""

from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map

from draft_worker.drafters.redrafter import ReDrafter, ReDrafterForm
from draft_worker.drafters.redrafter_checkpoint import write_redrafter
from draft_worker.training.columns import Chains, drawn, no_hits, whole, windows
from draft_worker.training.corpus.guessable import Guessable
from draft_worker.training.corpus.rows import Row
from draft_worker.training.kind import Judge, TrainingSetting
from draft_worker.training.losses import loss, wanted
from draft_worker.training.target import trained

BLOCKS = 2
_SHARE = 0.02
"""Of a random matrix that begins near zero."""


class ReDrafterTraining:
    """The head is the target's, which `exit_dim` = its width allows, and is not trained."""

    tables = ()

    def __init__(self, setting: TrainingSetting) -> None:
        target = setting.target
        self._target = target
        self._guessable = Guessable(target, setting.head_tokens)
        self.network = ReDrafter(
            ReDrafterForm(
                width=target.width,
                vocabulary=target.vocabulary,
                exit=target.width,
                blocks=setting.layers or BLOCKS,
            )
        )
        # The head stands outside, because training never needs all of its rows.
        self.network.lm_head = self.network.lm_head[:-1]
        passed = mx.concatenate([mx.eye(target.width), mx.zeros((target.width, target.width))], axis=1)
        self.network.input_proj.weight = passed + _SHARE * self.network.input_proj.weight
        self.parameters_per_guess = trained(self.network) + len(setting.head_tokens) * target.width

    def loss(self, row: Row, random: np.random.Generator) -> mx.array:
        columns = drawn(row, random)
        if not columns.steps:
            return mx.array(0.0)
        tokens, offsets = self._guessable.drawn(random)
        slots = columns.guessed()
        head = self._target.head(tokens)
        choices = wanted(mx.array(row.states[slots, -1]) @ head.T + offsets, row.temperature)
        total = mx.array(0.0)
        for step, logits in enumerate(self._unrolled(row, columns, head)):
            here = choices.at(mx.array(np.searchsorted(slots, columns.slots(step))))
            total = total + loss(logits + offsets, here).mean()
        return total

    def hits(self, row: Row, places: np.ndarray, judge: Judge) -> np.ndarray:
        columns, order = whole(row, places)
        chain = no_hits(places)
        for step, logits in enumerate(self._unrolled(row, columns, self._target.head(self._guessable.tokens))):
            slots = columns.slots(step)
            chain[order[: len(slots)], step] = judge(slots, logits)
        return windows(chain)

    def write(self, folder: Path) -> None:
        network = ReDrafter(self.network.form)
        network.update({**self.network.parameters(), "lm_head": []})
        network.lm_head = [*self.network.lm_head, network.lm_head[-1]]
        network.lm_head[-1].weight = self._target.head()
        network.update(tree_map(lambda array: array.astype(mx.float16), network.parameters()))
        write_redrafter(folder, network)
        self._guessable.write(folder)

    def _unrolled(self, row: Row, columns: Chains, head: mx.array) -> Iterator[mx.array]:
        """For each step the (n, head) logits behind `columns.slots(step)`."""
        network = self.network
        embedded = self._target.embed(mx.array(row.tokens))
        feature = mx.array(row.states[np.maximum(columns.places - 1, 0), -1])
        state = mx.zeros_like(feature)
        for step in range(columns.steps):
            slots = columns.slots(step)
            state = network.step(state[: len(slots)], embedded[mx.array(slots)])
            yield network.logits(feature[: len(slots)], state) @ head.T
