"""The block drafters: one forward guesses the tokens of several positions. Knows no messages.

A forward serves anchors, those of several sequences too. The candidates of the tree nodes behind an anchor come from
its rows without a forward, as far as its block reaches, even when the root has moved on.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Self

import mlx.core as mx
import numpy as np

from draft_worker.candidates.block_candidates import RankedRows, SelectorTables, propose_among
from draft_worker.candidates.head_columns import Columns, ColumnsEngine
from draft_worker.drafters.block import MarkovHead, read_block
from draft_worker.drafters.block_forward import (
    Block,
    BlockContext,
    BlockRows,
    BlockRunner,
    MlxBlockRunner,
)
from draft_worker.drafters.peagle import read_peagle
from draft_worker.drafters.token_ends import drafter_ends
from draft_worker.engine_interface import Batch, EngineSequence, RowTree, TokenRow
from protocol.contracts.drafters.detection import read_drafter
from protocol.contracts.engines import EngineDeclaration
from protocol.contracts.tokenizer_fingerprint import vocabulary_fingerprint
from protocol.messages.features import FeatureForm
from protocol.messages.sampling import Sampling
from protocol.speculation.token_tree import Candidates
from protocol.worker.process import WorkerSetup

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]

ENGINE = EngineDeclaration(help="a block drafter: DFlash, DSpark, DFlash2 or P-EAGLE", model="drafter")
_BLOCKS = 16
"""Most blocks of one forward, which bounds its memory."""


def load(setup: WorkerSetup) -> "BlockEngine":
    """Raises InputError if the folder holds no block drafter, or one of another target."""
    return BlockEngine.load(Path(setup.model), Path(setup.target) if setup.target else None)


class BlockEngine(ColumnsEngine):
    """A block drafter."""

    name = "block"

    def __init__(self, folder: Path, runner: BlockRunner, tokens: Path) -> None:
        """`tokens`: the folder of the tokenizer."""
        form = runner.form
        self.model = str(folder)
        self.architecture = runner.architecture
        self.set_up_columns(tokens, form.vocabulary, runner.head_tokens)
        self.context, self.block = form.positions, form.rows
        self.device = str(mx.default_device())
        self.tokenizer = vocabulary_fingerprint(tokens)
        self.features = FeatureForm(form.outputs, form.output_width)
        self.joint = runner.joint
        self.runner = runner

    @classmethod
    def load(cls, folder: Path, target: Path | None) -> Self:
        """`target`: the folder of the target, whose tokenizer is the drafter's too.

        Raises InputError if a folder is damaged, or the two don't fit.
        """
        found, tokens = read_drafter(folder), folder if target is None else target
        if found is not None and found.kind == "peagle":
            return cls(folder, read_peagle(folder, target), tokens)
        drafter = read_block(folder)
        form, element = drafter.network.form, drafter.network.norm.weight.dtype
        ends = drafter_ends(folder, drafter.ends, target, form.width, form.vocabulary, element)
        return cls(folder, MlxBlockRunner(drafter.network, ends, drafter.head_tokens), tokens)

    def open(self, sampling: Sampling, vocabulary: int) -> "BlockSequence":
        return self.around(self.runner.open(), [], sampling, vocabulary)

    def evaluate_together(self, parts: "Sequence[tuple[BlockSequence, Batch]]") -> list[list[Candidates]]:
        placed = [sequence.place(batch) for sequence, batch in parts]
        anchors = [
            (sequence, node)
            for (sequence, _), nodes in zip(parts, placed, strict=True)
            for node in nodes
            if node.offset == 0
        ]
        for first in range(0, len(anchors), _BLOCKS):
            self._forward(anchors[first : first + _BLOCKS])
        return [sequence.candidates(nodes, batch) for (sequence, batch), nodes in zip(parts, placed, strict=True)]

    def _forward(self, anchors: "Sequence[tuple[BlockSequence, _BlockRow]]") -> None:
        """The rows of new anchors, those of a sequence behind one another."""
        groups = [(sequence, [node for _, node in group]) for sequence, group in groupby(anchors, itemgetter(0))]
        asked = [(sequence.context, [sequence.block(node) for node in nodes]) for sequence, nodes in groups]
        for (_, nodes), found in zip(groups, self.runner.forward(asked), strict=True):
            for node, rows in zip(nodes, found, strict=True):
                node.anchor.rows = rows

    def around(self, context: BlockContext, tokens: list[int], sampling: Sampling, vocabulary: int) -> "BlockSequence":
        """A sequence of these committed tokens."""
        return BlockSequence(self, context, tokens, sampling, self.columns(vocabulary))


class _Anchor:
    """A row with a block of its own. Rows refer to it, so its block is freed with the last of them."""

    def __init__(self) -> None:
        self.rows: BlockRows | None = None
        """None until its forward."""
        self.ranked: RankedRows | None = None
        """Where a row's guesses do not depend on the token before it."""


class _BlockRow(TokenRow):
    """A row of the tree, and which row of which block guesses the token behind it."""

    def __init__(self, token: int, parent: int, position: int, anchor: _Anchor, offset: int) -> None:
        """`position`: index of the token. `offset`: how far behind the anchor, and so the number in its block."""
        super().__init__(token, parent)
        self.position = position
        self.anchor = anchor
        self.offset = offset
        self.above: _BlockRow | None = None
        """The row before it in the same block, until a recurrent Markov head has read its state."""
        self.state: mx.array | None = None
        """Of a recurrent Markov head, behind this row."""


class BlockSequence(EngineSequence):
    """The context of one sequence, the rows of its tree, and the sampling of its request."""

    copyable = True

    def __init__(
        self, engine: BlockEngine, context: BlockContext, tokens: list[int], sampling: Sampling, columns: Columns
    ) -> None:
        self._engine = engine
        self._form = engine.runner.form
        self.context = context
        self._tokens = context.tokens = tokens
        self._sampling = sampling
        self._columns = columns
        self._tree = RowTree[_BlockRow]()
        self._tip: _BlockRow | None = None
        """The row of the last committed token, if it had one."""
        self._forwards: tuple[int, ...] = ()

    @property
    def committed(self) -> int:
        return len(self._tokens)

    @property
    def next_row(self) -> int:
        return self._tree.next_row

    def prefill(self, tokens: Sequence[int]) -> None:
        self._tokens += tokens
        self._tip = None

    def feed(self, first: int, rows: "NDArray[np.float32]") -> None:
        self.context.feed(first, rows)

    @property
    def unread(self) -> bool:
        return self.context.unread

    def read(self, most: int) -> int:
        return self.context.read(most)

    @property
    def staleness(self) -> int:
        return self.committed - self.context.end

    def evaluate(self, batch: Batch) -> list[Candidates]:
        return self._engine.evaluate_together([(self, batch)])[0]

    def place(self, batch: Batch) -> "list[_BlockRow]":
        """Rows for the nodes of a batch; those with offset 0 need a forward over their `block`."""
        if batch.committed:
            self.prefill(batch.committed)
            self._tree.skip(len(batch.committed))
        nodes = [self._placed(token, parent) for token, parent in zip(batch.tokens, batch.parents, strict=True)]
        tokens = sum(len(self.block(node).tokens) + self._form.masks for node in nodes if node.offset == 0)
        self._forwards = (tokens,) if tokens else ()
        return nodes

    def candidates(self, nodes: "Sequence[_BlockRow]", batch: Batch) -> list[Candidates]:
        """Behind each of these nodes of `place`, whose anchors have rows."""
        positions = [node.position + 1 + batch.skipped for node in nodes]
        selector = self._engine.runner.selector
        if selector is None:
            return self._proposed(nodes, positions, batch)
        columns, logits, scores = self._chosen(selector, nodes)
        if batch.processors is not None:
            spread = _spread(self._logits(nodes), columns, logits, scores)
            return self._columns.propose(spread, positions, self._sampling, batch)
        head, beside = self._engine.runner.head_tokens, self._columns
        tokens = columns if head is None else head[columns].astype(np.int64)
        return propose_among(tokens, scores, positions, self._sampling, batch, beside.vocabulary, beside.shared)

    @property
    def forward_widths(self) -> Sequence[int]:
        """Over the inputs of the new anchors' blocks; none if older blocks reached all nodes."""
        return self._forwards

    def keep(self, path: Sequence[int], surviving: Iterable[int]) -> None:
        for row in self._tree.keep(path, surviving):
            self._tip = row
            self._tokens.append(row.token)

    def truncate(self, length: int) -> None:
        del self._tokens[length:]
        self._tree.clear()
        self._tip = None
        self.context.truncate(length)

    @property
    def memory(self) -> int:
        return self.context.store.memory

    def reopen(self, length: int, sampling: Sampling, vocabulary: int, *, exclusive: bool) -> "BlockSequence":
        context = self.context if exclusive else self.context.copy(length)
        context.truncate(length)
        return self._engine.around(context, self._tokens[:length], sampling, vocabulary)

    def _placed(self, token: int, parent: int) -> _BlockRow:
        """The next row, in its parent's block if that reaches so far; otherwise it is an anchor."""
        above = self._tree.get(parent)
        position = self.committed if above is None else above.position + 1
        if above is None and self._known(position) > self._form.clean_prefix:
            # Rows of an older block are better than a block whose known tokens have a gap before them.
            above = self._tip
        if above is not None and above.offset + 1 < self._form.rows:
            node = _BlockRow(token, parent, position, above.anchor, above.offset + 1)
            node.above = above if self._form.markov == "rnn" else None
        else:
            node = _BlockRow(token, parent, position, _Anchor(), 0)
        self._tree.add(node)
        return node

    def _known(self, position: int) -> int:
        """Known tokens of a block whose anchor is at `position`: those behind the context."""
        return position + 1 - self.context.end

    def block(self, anchor: _BlockRow) -> Block:
        """With the tokens behind the context, as many as the drafter was trained for; the others are left out."""
        reverse = [anchor.token, *(row.token for row in self._tree.path(anchor.parent))]
        tokens = self._tokens[self.context.end :] + reverse[::-1]
        return Block(tokens[-self._form.clean_prefix :], anchor.position)

    def _proposed(self, nodes: Sequence[_BlockRow], positions: Sequence[int], batch: Batch) -> list[Candidates]:
        """From whole rows of logits, or from rows that were ranked with their block."""
        if self._engine.runner.markov_head is not None or batch.processors is not None:
            return self._columns.propose(self._logits(nodes), positions, self._sampling, batch)
        followers = self._columns.followers(batch) or [()] * len(nodes)
        return [
            self._ranked(node, position, batch.limit).candidates(node.offset, found, batch.limit)
            for node, position, found in zip(nodes, positions, followers, strict=True)
        ]

    def _ranked(self, node: _BlockRow, position: int, limit: int) -> RankedRows:
        """The rows of the node's anchor. `position`: absolute, of the token behind the node."""
        anchor = node.anchor
        if anchor.ranked is None or anchor.ranked.limit < limit:
            first = position - node.offset
            anchor.ranked = RankedRows(_rows(node).logits, first, self._columns, self._sampling, limit)
        return anchor.ranked

    def _logits(self, nodes: Sequence[_BlockRow]) -> mx.array:
        """(L, head): each node's row, with the Markov head's correction by its own token."""
        logits = _gathered(nodes, lambda rows: rows.logits)
        head = self._engine.runner.markov_head
        return logits if head is None else logits + head.correction(self._latents(head, nodes))

    def _chosen(
        self, selector: SelectorTables, nodes: Sequence[_BlockRow]
    ) -> "tuple[NDArray[np.int64], Floats, Floats]":
        """(L, K) columns that the selector chooses among, their logits, and the scores that it makes of them."""
        found = [(choices, node.offset) for node in nodes if (choices := _rows(node).choices) is not None]
        columns = np.stack([each.columns[offset] for each, offset in found])
        logits = np.stack([each.logits[offset] for each, offset in found])
        head = self._engine.runner.head_tokens
        tokens = columns if head is None else head[columns]
        latents = np.stack([each.latents[offset] for each, offset in found])
        own = np.array([node.token for node in nodes])
        return columns, logits, logits + selector.corrections(own, latents, tokens)

    def _latents(self, head: MarkovHead, nodes: Sequence[_BlockRow]) -> mx.array:
        """(L, rank) of the Markov head."""
        states = _gathered(nodes, lambda rows: rows.states)
        tokens = mx.array([node.token for node in nodes])
        if self._form.markov != "rnn":
            return head.step(head.initial(1), tokens, states)[1]
        latents = []
        for row, node in enumerate(nodes):
            above = None if node.above is None else node.above.state
            state = head.initial(1)[0] if above is None else above
            node.state, latent = head.step(state, tokens[row], states[row])
            node.above = None
            latents.append(latent)
        mx.async_eval([node.state for node in nodes])
        return mx.stack(latents)


def _gathered(nodes: Sequence[_BlockRow], table: Callable[[BlockRows], mx.array]) -> mx.array:
    """Each node's row of its anchor's `table`."""
    groups = [list(group) for _, group in groupby(nodes, lambda node: node.anchor)]
    parts = [table(_rows(group[0]))[mx.array([node.offset for node in group])] for group in groups]
    return mx.concatenate(parts)


def _rows(node: _BlockRow) -> BlockRows:
    rows = node.anchor.rows
    assert rows is not None, "a node's anchor was not evaluated"
    return rows


def _spread(whole: mx.array, columns: "NDArray[np.int64]", logits: "Floats", scores: "Floats") -> mx.array:
    """(L, head) logits in which the selector's scores stand at its `columns`, with the mass that these had before.

    Processors may forbid all of them: then the others count, as the head ranks them.
    """
    moved = scores - _mass(scores) + _mass(logits)
    return mx.put_along_axis(whole.astype(mx.float32), mx.array(columns), mx.array(moved), axis=-1)


def _mass(rows: "Floats") -> "Floats":
    """(L, 1): the logarithm of the sum of the exponentials."""
    best = rows.max(axis=-1, keepdims=True)
    return best + np.log(np.exp(rows - best).sum(axis=-1, keepdims=True))
