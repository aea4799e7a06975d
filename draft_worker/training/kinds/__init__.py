"""One module a kind of drafter: its network's start, its loss, its guesses, its files."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from draft_worker.training.kind import Training, TrainingSetting
from draft_worker.training.kinds import block, eagle3, layers
from draft_worker.training.target import Target
from protocol.contracts.training import TrainedKind


class Kind(NamedTuple):
    """How a kind of drafter is trained."""

    outputs: Callable[[Target, int], tuple[int, ...]]
    """With the user's choice of layers: the target's outputs that it reads besides FINAL. Raises InputError if the
    kind can't be trained so."""
    training: Callable[[TrainingSetting], Training]


def _block(kind: block.BlockTrainedKind) -> Kind:
    return Kind(lambda target, _: block.outputs(target.layers), partial(block.BlockTraining, kind=kind))


KINDS: Mapping[TrainedKind, Kind] = MappingProxyType(
    {
        "eagle3": Kind(eagle3.outputs, eagle3.Eagle3Training),
        "dspark": _block("dspark"),
        "dflash": _block("dflash"),
        "dflash2": _block("dflash2"),
        "jetspec": _block("jetspec"),
        "exit": Kind(lambda target, chosen: layers.outputs(target.layers, chosen), layers.ExitTraining),
        "lm": Kind(lambda *_: (), layers.LanguageTraining),
    }
)
