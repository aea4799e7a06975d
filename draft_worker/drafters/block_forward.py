"""Forwards of a block drafter over several blocks of a sequence. Knows no trees and no sampling."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import mlx.core as mx

from draft_worker.drafters.block import BlockDrafter
from draft_worker.drafters.block_context import BlockContext
from draft_worker.drafters.block_form import BlockForm
from draft_worker.drafters.block_kv import BlockKv
from draft_worker.drafters.markov import MarkovHead
from draft_worker.drafters.token_ends import TokenEnds
from draft_worker.head_tokens import HeadTokens


class Block(NamedTuple):
    """A block's known tokens; the last one is the anchor, at index `position`."""

    tokens: Sequence[int]
    position: int


class BlockRows(NamedTuple):
    """What a forward says of one block. Row k is about the token k + 1 behind the anchor."""

    logits: mx.array
    """(rows, head), before any Markov correction; finite."""
    states: mx.array
    """(rows, width), behind the final norm."""


class BlockInputs(NamedTuple):
    """The inputs of several blocks, one after the other."""

    tokens: list[int]
    positions: list[int]
    numbers: list[int]
    """The block of each input."""
    rows: list[int]
    """The inputs whose rows guess, a block's after the other's."""

    @classmethod
    def of(cls, form: BlockForm, blocks: Sequence[Block]) -> "BlockInputs":
        inputs = cls([], [], [], [])
        for number, block in enumerate(blocks):
            count = len(block.tokens) + form.masks
            first, end = block.position - len(block.tokens) + 1, len(inputs.tokens) + count
            inputs.rows.extend(range(end - form.rows, end))
            inputs.tokens.extend([*block.tokens, *[form.mask_token] * form.masks])
            inputs.positions.extend(range(first, first + count))
            inputs.numbers.extend([number] * count)
        return inputs


class BlockRunner(Protocol):
    """A drafter that runs: in MLX, or as a package on another device."""

    form: BlockForm
    markov_head: MarkovHead | None
    head_tokens: HeadTokens | None
    """Those of the columns of the logits; None: column c is token c."""
    context: int
    """It evaluates the positions below this number."""
    device: str

    def open(self) -> BlockContext:
        """The context of a new sequence."""
        ...

    def forward(self, context: BlockContext, blocks: Sequence[Block]) -> list[BlockRows]:
        """Every block sees the whole context and itself."""
        ...


class MlxBlockRunner:
    """The network and the two ends of its target."""

    def __init__(self, network: BlockDrafter, ends: TokenEnds, head_tokens: HeadTokens | None = None) -> None:
        """`head_tokens`: those that the columns of `ends.head` stand for."""
        self.form = network.form
        self.head_tokens = head_tokens
        self.markov_head: MarkovHead | None = None if self.form.markov is None else network.markov_head
        self.context = self.form.positions
        self.device = str(mx.default_device())
        self._network = network
        self._ends = ends

    def open(self) -> BlockContext:
        return BlockContext(BlockKv(self._network))

    def forward(self, context: BlockContext, blocks: Sequence[Block]) -> list[BlockRows]:
        network, form, store = self._network, self.form, context.store
        assert isinstance(store, BlockKv)
        inputs = BlockInputs.of(form, blocks)
        context.read_all()
        at = mx.array([inputs.positions])
        visible: list[mx.array | None] = [None] * form.layers
        if len(blocks) > 1 or form.windows or form.is_causal(None):
            behind = mx.full(at.shape, context.end)
            visible = network.visibility(mx.array([context.positions]), at, mx.array([inputs.numbers]), behind)
        embedded = self._ends.embed(mx.array([inputs.tokens]))
        states = network(embedded, at, store.keys_values(), visible)[0, mx.array(inputs.rows)]
        logits = self._ends.head(states)
        if form.soft_cap is not None:
            logits = mx.tanh(logits / form.soft_cap) * form.soft_cap
        logits = mx.nan_to_num(logits, nan=0.0)
        each = (len(blocks), form.rows, -1)
        found = [BlockRows(*pair) for pair in zip(logits.reshape(each), states.reshape(each), strict=True)]
        mx.eval(found)
        return found
