"""P-EAGLE: an EAGLE-3 drafter whose forward guesses a block of tokens. Runs it as a `BlockRunner`.

Its rows are those of EAGLE-3 as long as features are known: each joins a token with the target's feature of the token
before it. The rows behind them read a mask token and a learnt stand-in for the feature (vllm-project/speculators:
models/peagle), all in one forward, each behind the others. Knows no trees and no sampling.
"""

from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from draft_worker.candidates.block_candidates import SelectorTables
from draft_worker.drafters.block import MarkovHead
from draft_worker.drafters.block_forward import Asked, Block, BlockContext, BlockRows, FedRows, Rows
from draft_worker.drafters.eagle3 import Eagle3, borrow_ends, read_eagle3
from protocol.contracts.drafters.description import BlockForm, DecoderForm

_KEPT = 64
"""Last features that stay: a conversation that is cut back by fewer tokens goes on without a gap."""
_CLEAN = 8
"""Most known tokens at the head of a block."""


def read_peagle(folder: Path, target: Path | None) -> "PeagleRunner":
    """`target`: the folder of the target, whose embedding and head serve where the drafter has none.

    Raises InputError for files that are missing, damaged or of another form, and for another target.
    """
    network = read_eagle3(folder, target)
    borrow_ends(network, folder, target)
    return PeagleRunner(network)


class PeagleRunner:
    """A `BlockRunner` in MLX."""

    markov_head: MarkovHead | None = None
    selector: SelectorTables | None = None
    joint: bool = False
    architecture = "peagle"

    def __init__(self, network: Eagle3) -> None:
        form = network.form
        assert form.mask_token is not None, "the drafter has no mask"
        self.form = BlockForm(
            **{name: getattr(form, name) for name in DecoderForm.__struct_fields__},
            block=form.depths,
            mask_token=form.mask_token,
            anchor_predicts=True,
            clean_prefix=_CLEAN,
        )
        self.head_tokens = network.head_tokens
        self._network = network

    def open(self) -> BlockContext:
        return BlockContext(PeagleRows(self._network))

    def forward(self, asked: Sequence[Asked]) -> list[list[BlockRows]]:
        found = []
        for context, blocks in asked:
            store = context.store
            assert isinstance(store, PeagleRows)
            context.read_all()
            found.append([self._rows(store, block) for block in blocks])
        mx.eval(found)
        return found

    def _rows(self, store: "PeagleRows", block: Block) -> BlockRows:
        tokens = [*block.tokens, *[self.form.mask_token] * self.form.masks]
        states = store.behind(tokens, block.position - len(block.tokens) + 1)[len(block.tokens) - 1 :]
        return BlockRows(mx.nan_to_num(self._network.logits(states), nan=0.0), states)


class _Held(NamedTuple):
    """A feature that was fed."""

    number: int
    """How many were fed before it."""
    token: int
    """Index of its token."""
    row: Rows


class PeagleRows:
    """A `ContextStore`: the rows of the tokens behind those whose features were fed, as far as they are known."""

    def __init__(self, network: Eagle3) -> None:
        self._network = network
        self._caches = network.make_cache()
        self._read: list[int] = []
        """The number of the feature that each row has read."""
        self._held: list[_Held] = []
        """Features without rows, and some last ones."""
        self._count = 0

    def add(self, fed: FedRows, tokens: Sequence[int]) -> None:
        self._held += [_Held(self._count + place, fed.first + place, row) for place, row in enumerate(fed.rows)]
        self._count += len(fed.rows)
        # A row joins a feature with the token behind it. The last one is the block's, which begins with that token.
        last = self._read[-1] if self._read else -1
        ready = [each for each in self._held if last < each.number < self._count - 1]
        if ready:
            hidden = self._fused([each.row for each in ready])
            self._network(mx.array([[tokens[each.token + 1] for each in ready]]), hidden, cache=self._caches)
            self._read += [each.number for each in ready]
        done = self._read[-1] if self._read else -1
        self._held = [each for each in self._held if each.number > min(done, self._count - 1 - _KEPT)]

    def behind(self, tokens: Sequence[int], first: int) -> mx.array:
        """(L, width) states of rows that read these tokens, the first at index `first`; the store does not change."""
        feature = next((each.row for each in self._held if each.token == first - 1), None)
        masks = mx.broadcast_to(self._masked, (1, len(tokens) - (feature is not None), self._masked.shape[-1]))
        hidden = masks if feature is None else mx.concatenate([self._fused([feature]), masks], axis=1)
        states = self._network(mx.array([list(tokens)]), hidden, cache=self._caches)[0]
        mx.eval(states)
        self._trim(len(self._read))
        return states

    def compute(self) -> None:
        mx.eval([(cache.keys, cache.values) for cache in self._caches if cache.keys is not None])

    def keep(self, count: int) -> None:
        # The row of the last feature that is kept has read a token that is not.
        rows = bisect_left(self._read, count - 1)
        self._trim(rows)
        del self._read[rows:]
        self._held = [each for each in self._held if each.number < count]
        self._count = min(self._count, count)

    def copy(self, count: int) -> "PeagleRows":
        other = PeagleRows(self._network)
        for mine, theirs in zip(self._caches, other._caches, strict=True):
            if mine.keys is not None and mine.values is not None:
                theirs.update_and_fetch(mine.keys[..., : mine.offset, :], mine.values[..., : mine.offset, :])
        other._read, other._held, other._count = list(self._read), list(self._held), self._count
        other.keep(count)
        return other

    @property
    def memory(self) -> int:
        return sum(cache.nbytes for cache in self._caches) + sum(each.row.nbytes for each in self._held)

    @property
    def _masked(self) -> mx.array:
        """(1, 1, width): what stands in for a feature."""
        return self._network.fuse(self._network.mask_hidden)

    def _fused(self, rows: Sequence[Rows]) -> mx.array:
        """(1, L, width), finite."""
        network = self._network
        fused = network.fuse(mx.array(np.stack(rows)).astype(network.norm.weight.dtype))
        return mx.nan_to_num(fused[None], nan=0.0, posinf=0.0, neginf=0.0)

    def _trim(self, rows: int) -> None:
        for cache in self._caches:
            cache.trim(cache.offset - rows)
