"""What a package of a trained drafter states beside its decoder: how it reads the target's features. Knows no graph."""

from typing import Any, Literal, TypeAlias

import msgspec
from mlx.utils import tree_flatten

from draft_worker.drafters.block import markov_head
from protocol.contracts.drafters.description import BlockForm, Eagle3Form
from protocol.messages.features import FeatureForm

StateKind: TypeAlias = Literal["none", "raw", "normed", "latent"]
"""A row's output beside its logits: no output; the residual stream behind the last layer; the same behind the norm; the
selector's projection of the latter."""
SELECTOR = "candidate_selector"
"""The first part of its parameters' names."""
_MAX_CHANNELS = 16_384
"""The Neural Engine's longest axis."""


class Conditioning(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The drafter's form, one of the two, and how its features enter the package."""

    eagle3: Eagle3Form | None = None
    block: BlockForm | None = None
    largest: float
    """The largest magnitude of a feature, measured on the target."""
    scale: float
    """Inputs of fc times this power of two are the package's inputs; fc's weights are divided by it."""
    width: int = 32
    """Tokens of one call of the function that reads features."""

    def __post_init__(self) -> None:
        if (self.eagle3 is None) == (self.block is None):
            # msgspec turns this into a ValidationError when it decodes metadata.
            raise ValueError("a package holds one kind of drafter")

    @property
    def form(self) -> FeatureForm:
        """What is read of the target."""
        if self.block is not None:
            return FeatureForm(self.block.outputs, self.block.output_width)
        assert self.eagle3 is not None
        return FeatureForm(self.eagle3.outputs, self.eagle3.output_width)

    @property
    def state(self) -> StateKind:
        """What a row of the decoder returns beside its logits: EAGLE-3's next rows read it, some Markov heads do, a
        selector does."""
        if self.eagle3 is not None:
            return "normed" if self.eagle3.norm_output else "raw"
        assert self.block is not None
        if self.block.choices:
            return "latent"
        return "none" if self.block.markov in (None, "vanilla") else "normed"

    @property
    def function(self) -> str:
        """Name of the function that reads features: fuse projects them, context makes keys and values of them."""
        return f"fuse_{self.width}" if self.block is None else f"context_{self.width}"

    @property
    def parts(self) -> tuple[int, ...]:
        """Columns of fc in each of the inputs features_0, features_1, ...: as many outputs as one axis holds."""
        form = self.form
        most = max(1, _MAX_CHANNELS // form.width)
        count = len(form.outputs)
        return tuple(min(most, count - begin) * form.width for begin in range(0, count, most))

    def host_parameters(self, head_rows: int) -> dict[str, tuple[int, ...]]:
        """The drafter's parameters that the host computes with, and their shapes: a Markov head, a selector's
        codebooks, norms before fc."""
        if self.block is not None and self.block.choices:
            shape = (self.block.vocabulary, self.block.rank)
            return {f"{SELECTOR}.{name}_codebook": shape for name in ("predecessor", "successor")}
        if self.block is not None:
            head = None if self.block.markov is None else markov_head(self.block, head_rows)
            flat: Any = [] if head is None else tree_flatten(head.parameters())
            return {f"markov_head.{name}": tuple(array.shape) for name, array in flat}
        form = self.eagle3
        assert form is not None
        joint = {"input_norm.weight": (len(form.outputs) * form.output_width,)} if form.norm_before_fc else {}
        each = {f"fc_norm.{index}.weight": (form.output_width,) for index in range(len(form.outputs))}
        return joint | (each if form.fc_norm else {})

    def inputs(self) -> dict[str, tuple[int, ...]]:
        """The feature inputs of `function`."""
        return {f"features_{index}": (1, columns, 1, self.width) for index, columns in enumerate(self.parts)}
