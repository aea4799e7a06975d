"""How the rows of a drafter that reads features are computed. Knows no sampling."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from draft_worker.short_head import HeadTokens, ShortHead
from protocol.errors import InputError
from protocol.inference.joint_forward import ForwardPart
from protocol.inference.language_model import LanguageModel
from protocol.inference.tree_sequence import TreeSequence
from protocol.messages.features import FeatureForm

_MOST = 3e4
"""Larger numbers don't survive a product in half precision."""


class ConditionedDrafter(Protocol):
    """A network whose row i joins the feature of token i with the embedding of token i + 1."""

    head_tokens: HeadTokens | None
    norm: nn.RMSNorm
    """Its type is that of the whole network."""

    def fuse(self, features: mx.array) -> mx.array:
        """(..., width) from (..., outputs * output width) features."""
        ...

    def __call__(self, tokens: mx.array, hidden: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        """(B, L, width), what the next row may read in place of a fused feature."""
        ...

    def logits(self, hidden: mx.array) -> mx.array:
        """(..., head) from outputs."""
        ...

    def make_cache(self) -> list[Any]: ...


class ConditionedNetwork(nn.Module):
    """A drafter's network as `LanguageModel` runs one: the second input of each row is set before the forward.

    Called as an mlx-lm model; its "logits" are the rows' outputs, from which the drafter's head makes logits.
    """

    def __init__(self, drafter: ConditionedDrafter, width: int, config: Mapping[str, Any]) -> None:
        """`config`: `model_type`, and `max_position_embeddings` if the context is bounded."""
        super().__init__()
        self.drafter = drafter
        self._width = width
        self.config = dict(config)
        self._hidden: mx.array | None = None

    def read(self, hidden: mx.array | None) -> None:
        """Set the (L, width) second input of the next forward; None: zeros."""
        self._hidden = None if hidden is None else hidden[None]

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        hidden = self._hidden
        if hidden is None:
            hidden = mx.zeros((*tokens.shape, self._width), self.drafter.norm.weight.dtype)
        layer = cache[0] if isinstance(cache, list) and len(cache) == 1 else cache
        return bounded(self.drafter(tokens, hidden, cache=layer))

    def make_cache(self) -> list[Any]:
        return self.drafter.make_cache()


def bounded(hidden: mx.array) -> mx.array:
    """Without NaN and without infinities: one such key would spoil every later row, even a masked one."""
    return mx.clip(mx.nan_to_num(hidden, nan=0.0, posinf=_MOST, neginf=-_MOST), -_MOST, _MOST)


Input: TypeAlias = "np.ndarray | mx.array | None"
"""A feature (numpy), which is still to be fused, or what an earlier row left; None: zeros."""


class Wave(NamedTuple):
    """One forward of one sequence, and the second input of each row."""

    part: ForwardPart
    inputs: Sequence[Input]


class ConditionedRunner:
    """A drafter that runs. Raises InputError if its network's rows can't form trees."""

    def __init__(
        self,
        network: ConditionedDrafter,
        folder: Path,
        *,
        features: FeatureForm,
        width: int,
        vocabulary: int,
        context: int,
        architecture: str,
        short_head: ShortHead | None = None,
    ) -> None:
        """`width`: elements of a fused feature and of an output. `short_head`: whose tokens those of a context can
        join."""
        self.features = features
        self.width = width
        self.blank = mx.zeros((width,), network.norm.weight.dtype)
        """In place of an output that is not there."""
        self.vocabulary = vocabulary
        self.context = context
        self.architecture = architecture
        self.head_tokens = network.head_tokens
        self.short_head = short_head
        config = {"model_type": architecture, "max_position_embeddings": context}
        self._network = ConditionedNetwork(network, width, config)
        self.model = LanguageModel(self._network, folder, config)
        if self.model.level != "tree":
            raise InputError(
                f"The drafter in {folder} can't evaluate token trees ({self.model.level_reason}): choose another one."
            )
        self.joint = self.model.joins
        self._drafter = network

    def open(self) -> TreeSequence:
        """The rows of a new, empty sequence."""
        rows = self.model.sequence()
        assert isinstance(rows, TreeSequence)
        return rows

    def forward(self, waves: Sequence[Wave]) -> list[mx.array]:
        """(L, width), what the rows of each wave leave, finite: for `logits`, and as an input of later rows."""
        self._network.read(self._second_inputs([each for wave in waves for each in wave.inputs]))
        outputs = self.model.evaluate_together([wave.part for wave in waves])
        self._network.read(None)
        return outputs

    def logits(self, outputs: mx.array) -> mx.array:
        """(L, head), finite, from what rows left."""
        return bounded(self._drafter.logits(outputs))

    def _second_inputs(self, inputs: Sequence[Input]) -> mx.array:
        """(L, width). All features are fused in one product."""
        features = [each for each in inputs if isinstance(each, np.ndarray)]
        given = mx.array(np.stack(features)).astype(self.blank.dtype) if features else None
        fused = mx.array([]) if given is None else bounded(self._drafter.fuse(given))
        if len(features) == len(inputs):
            return fused
        known = iter(fused)
        rows = [self.blank if each is None else each for each in inputs]
        return mx.stack([next(known) if isinstance(each, np.ndarray) else each for each in rows])
