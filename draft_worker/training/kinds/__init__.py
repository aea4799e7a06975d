"""One module a kind of drafter: its network's start, its loss, its guesses, its files."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from draft_worker.training.kind import Setting, Training
from draft_worker.training.kinds import block, eagle3, layers, redrafter
from protocol.contracts.training import TrainedKind


class Kind(NamedTuple):
    """How a kind of drafter is trained."""

    outputs: Callable[[int, int], tuple[int, ...]]
    """Of a target of so many layers, and with the user's choice of layers: the outputs that it reads besides FINAL."""
    training: Callable[[Setting], Training]


KINDS: Mapping[TrainedKind, Kind] = MappingProxyType(
    {
        "eagle3": Kind(lambda layers, _: eagle3.outputs(layers), eagle3.Eagle3Training),
        "dspark": Kind(lambda layers, _: block.outputs(layers), partial(block.BlockTraining, dspark=True)),
        "dflash": Kind(lambda layers, _: block.outputs(layers), partial(block.BlockTraining, dspark=False)),
        "redrafter": Kind(lambda *_: (), redrafter.ReDrafterTraining),
        "exit": Kind(layers.outputs, layers.ExitTraining),
        "lm": Kind(lambda *_: (), layers.LanguageTraining),
    }
)
