"""One sequence of a drafter whose rows read features: its forwards, and the rows of its tree.

A row reads the true feature of the token before it, or the output of the row before in its place. Knows no network, no
sampling and no messages.
The row of the token at index i reads the feature of token i - 1.
"""

from collections.abc import Generator, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from draft_worker.conditioned.runner import Input, TreeRows, Wave
from draft_worker.engine import Batch, SharedKv
from draft_worker.row_tree import RowTree, TokenRow
from protocol.messages.kv import KvReference

Feature: TypeAlias = NDArray[np.float32]

MOST_OWN = 16
"""So many committed tokens without rows and features get rows from the drafter's own outputs, one forward each."""
_RECENT = 64
"""Features of so many last tokens are kept after their use: rows behind a late one are computed again."""
_LARGEST = np.float32(6e4)
"""Half precision ends at 65,504; states of a healthy model are below."""


class Due(NamedTuple):
    """Rows of the committed tokens from index `first` on are to be computed."""

    first: int
    anew: bool = False
    """The rows in front of them are dropped."""


class CommittedRows:
    """Which committed tokens have rows, which of the rows read true features, and which is due next.

    Token 0 has a row only if it was a root. Pure: knows no network and no KV.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.start = 0
        """The first token with a row."""
        self.end = 0
        """Behind the last token with a row; `start` if none has."""
        self.newest = -1
        """The last token whose feature was fed."""
        self.inputs: dict[int, Any] = {}
        """By token: what its row read in place of a feature."""
        self._features: dict[int, Feature] = {}
        self._settled = 0
        """Rows of the tokens below this one stay: features of theirs are gone."""

    def feed(self, first: int, rows: Feature) -> None:
        """Features of the tokens from index `first` on. Those that are not finite are as if they were lost."""
        rows = rows[: max(0, len(self.tokens) - first)]
        sound = np.isfinite(rows).all(axis=1)
        for index in np.flatnonzero(sound).tolist():
            self._features[first + index] = np.clip(rows[index], -_LARGEST, _LARGEST)
            self.newest = max(self.newest, first + index)

    def feature(self, token: int) -> Feature | None:
        """What the row of this token reads; None: it is not there."""
        return self._features.get(token - 1)

    @property
    def due(self) -> Due | None:
        """None: no row is to be computed, or no more can be before features come (`blocked`)."""
        if self.end > self.start:
            back = self._readable_back_to(self.start)
            if back < self.start >= self._settled:
                return Due(back, anew=True)
            late = [token for token in self.inputs if token >= self._settled and token - 1 in self._features]
            if late:
                return Due(min(late))
        missing = self._missing
        if missing >= len(self.tokens):
            return None
        if missing - 1 in self._features:
            return Due(missing, anew=self.end == self.start)
        fresh = min((each + 1 for each in self._features if each >= missing), default=len(self.tokens))
        if fresh - missing <= MOST_OWN:
            return Due(missing, anew=self.end == self.start)
        return Due(fresh, anew=True) if fresh < len(self.tokens) else None

    @property
    def blocked(self) -> bool:
        """Whether so many tokens lack rows and features that nothing can be guessed behind them."""
        return self.due is None and self._missing < len(self.tokens)

    @property
    def waiting(self) -> int:
        """Committed tokens from the first one on whose row can be computed from a true feature."""
        due = self.due
        return 0 if due is None or self.feature(due.first) is None else len(self.tokens) - due.first

    def readable(self, first: int, most: int) -> int:
        """How many tokens from `first` on, at most so many, have a feature each."""
        count = 0
        while count < most and first + count < len(self.tokens) and first + count - 1 in self._features:
            count += 1
        return count

    def restart(self, start: int) -> None:
        """No token has a row; the first one with a row will be `start`."""
        self.start = self.end = start
        self.inputs = {}

    def computed(self, end: int) -> None:
        """The tokens up to `end` have rows, and those behind have none."""
        self.end = end
        self.inputs = {token: read for token, read in self.inputs.items() if token < end}
        for token in [each for each in self._features if each < min(end - 1, len(self.tokens) - _RECENT)]:
            del self._features[token]
            self._settled = max(self._settled, token + 2)

    @property
    def staying(self) -> int:
        """Behind the last of the first tokens whose rows are never computed again; 0 if token 1 has none."""
        late = (token for token in self.inputs if token >= self._settled)
        return min(late, default=self.end) if self.start == 1 else 0

    def adopt(self, tokens: Sequence[int]) -> None:
        """These are the first tokens, and all behind the first one have rows."""
        self.tokens += tokens
        self.start, self.end = 1, len(self.tokens)
        # The next row reads the feature of the last token.
        self.newest = self.end - 2
        self._settled = self.end

    def truncate(self, length: int) -> None:
        del self.tokens[length:]
        self.end = max(self.start, min(self.end, length))
        self.newest = min(self.newest, length - 1)
        self._settled = min(self._settled, self.end)
        self.inputs = {token: read for token, read in self.inputs.items() if token < self.end}
        self._features = {token: each for token, each in self._features.items() if token < length}

    def copy(self, length: int) -> "CommittedRows":
        other = CommittedRows()
        other.tokens, other.start, other.end, other.newest = list(self.tokens), self.start, self.end, self.newest
        other.inputs, other._features, other._settled = dict(self.inputs), dict(self._features), self._settled
        other.truncate(length)
        return other

    @property
    def memory(self) -> int:
        """Bytes of features."""
        return sum(each.nbytes for each in self._features.values())

    @property
    def _missing(self) -> int:
        """The first token that has no row and needs one."""
        return self.end if self.end > self.start else 1

    def _readable_back_to(self, token: int) -> int:
        """The first token from which on all up to `token` have features."""
        while token > 1 and token - 2 in self._features:
            token -= 1
        return token


Outputs: TypeAlias = Sequence[mx.array | None]
"""By node of a batch: (width,), or None for a node that could not be evaluated."""


class _ReadingRow(TokenRow):
    """A row of the tree, and what it reads and leaves."""

    def __init__(self, token: int, parent: int) -> None:
        super().__init__(token, parent)
        self.read: Input = None
        """Its second input."""
        self.true = False
        """It read a true feature."""
        self.output: mx.array | None = None
        self.evaluated = False


class ConditionedRows:
    """Committed tokens, with features as far as they were fed, and a tree behind them.

    Rows are numbered as in `EngineSequence`. A node behind too many tokens without rows is not evaluated, nor is one
    for which there is no room.
    """

    def __init__(self, rows: TreeRows) -> None:
        self._rows = rows
        self._committed = CommittedRows()
        self._tree = RowTree[_ReadingRow]()
        self._tip: tuple[int, mx.array | None] = (-1, None)
        """The last committed token with a row, and the row's output."""

    @property
    def committed(self) -> CommittedRows:
        return self._committed

    @property
    def next_row(self) -> int:
        return self._tree.next_row

    @property
    def memory(self) -> int:
        return self._rows.memory + self._committed.memory

    def depths(self, batch: Batch) -> list[int]:
        """Index of the token of each node, from row numbers after the forwards of `batch`. Of nodes that were not
        evaluated, any number."""
        first = self.next_row - len(batch.tokens)
        rows = range(first, self.next_row)
        return [self._rows.position(row) + 1 if self._tree[row].evaluated else 0 for row in rows]

    def append(self, tokens: Sequence[int]) -> None:
        """Commit tokens without rows. There must be no nodes."""
        self._committed.tokens += tokens

    def forwards(self, batch: Batch) -> Generator[Wave, mx.array, Outputs]:
        """The forwards that evaluate a batch, one after the other: takes the (L, width) outputs of each."""
        self.append(batch.committed)
        self._skip(len(batch.committed))
        first, count = self.next_row, len(self._committed.tokens)
        yield from self._waves(count, list(zip(batch.tokens, batch.parents, strict=True)))
        return [self._tree[row].output for row in range(first, self.next_row)]

    def reading(self, most: int) -> Generator[Wave, mx.array, None]:
        """The forward over at most `most` committed tokens whose features were fed; over more if there are nodes, whose
        committed ancestors must not lack rows."""
        due = self._committed.due
        if due is not None:
            whole, some = len(self._committed.tokens), due.first + self._committed.readable(due.first, most)
            yield from self._waves(whole if self._tree else some, [])

    def compute(self) -> None:
        """Compute the forwards so far: MLX builds them first."""
        if self._tip[1] is not None:
            mx.eval(self._tip[1])

    def keep(self, path: Sequence[int], surviving: Iterable[int]) -> None:
        surviving, known = tuple(surviving), self._committed
        nodes = self._tree.keep(path, surviving)
        gapless = max(known.end, known.start) == len(known.tokens)
        run = next((place for place, node in enumerate(nodes) if not node.evaluated), len(nodes)) if gapless else 0
        alive = [row for row in surviving if self._tree[row].evaluated] if run == len(nodes) else []
        self._rows.keep(path[:run], alive)
        for place, node in enumerate(nodes):
            token = len(known.tokens)
            known.tokens.append(node.token)
            if place < run:
                known.end = token + 1
                self._tip = token, node.output
                if not node.true:
                    known.inputs[token] = node.read
        for row in set(surviving) - set(alive):
            self._tree[row].evaluated = False
        known.computed(known.end)

    def truncate(self, length: int) -> None:
        self._committed.truncate(length)
        self._tree.clear()
        self._rows.truncate(self._committed.end - self._committed.start)
        if self._tip[0] >= self._committed.end:
            self._tip = (-1, None)

    def copy(self, length: int, empty: TreeRows) -> "ConditionedRows":
        """`empty`: a new sequence of the same network."""
        known = self._committed.copy(length)
        rows = known.end - known.start
        other = ConditionedRows(self._rows.copy(rows) if rows else empty)
        other._committed = known
        other._tip = self._tip if self._tip[0] < known.end else (-1, None)
        return other

    @property
    def size(self) -> int:
        """Bytes of shared memory; 0 if the rows end with this process."""
        return self._rows.size if isinstance(self._rows, SharedKv) else 0

    def save(self) -> KvReference | None:
        """As `EngineSequence.save`, of the tokens whose rows stay. Token 0 has none."""
        stay = self._committed.staying
        return self._rows.save(stay - 1) if stay > 1 and isinstance(self._rows, SharedKv) else None

    def adopt(self, reference: KvReference, tokens: Sequence[int]) -> bool:
        """Whether rows can be adopted. Raises ArenaError or SegmentError."""
        if not isinstance(self._rows, SharedKv):
            return False
        self._rows.adopt(reference, len(tokens) - 1)
        self._committed.adopt(tokens)
        return True

    def close(self) -> None:
        self._rows.close()

    def _skip(self, count: int) -> None:
        """Give the next `count` row numbers to no row."""
        self._tree.skip(count)
        self._rows.skip(count)

    def _waves(self, stop: int, nodes: Sequence[tuple[int, int]]) -> Generator[Wave, mx.array, None]:
        """Rows of the committed tokens that are due before `stop`, then those of `nodes`, (token, parent) each.

        A row whose input is the output of another row waits for the wave behind that row's.
        """
        known, due, rest = self._committed, self._committed.due, list(nodes)
        at = stop if due is None else due.first
        if due is not None and due.anew:
            self._restart(due.first)
        elif due is None and known.end == known.start and not self._tree:
            self._restart(len(known.tokens))
        while at < stop or rest:
            begin, inputs = at, list[Input]()
            while at < stop and (at == begin or self._is_ready(at)):
                inputs.append(self._committed_input(at))
                at += 1
            taken = self._take(rest, inputs, waits=at > begin) if at == stop else []
            if not inputs:
                continue
            tokens = [*known.tokens[begin:at], *(row.token for row in taken)]
            first = begin - known.start if at > begin else None
            outputs = yield Wave(self._rows, tokens, [row.parent for row in taken], first, inputs)
            if at > begin:
                self._tip = at - 1, outputs[at - begin - 1]
                known.computed(at)
            for place, row in enumerate(taken, start=at - begin):
                row.output = outputs[place]

    def _restart(self, token: int) -> None:
        self._committed.restart(token)
        self._rows.restart(token - 1)
        self._tip = (-1, None)

    def _is_ready(self, token: int) -> bool:
        """Whether the row of a committed token can share a forward with the row before it."""
        known = self._committed
        return known.feature(token) is not None or token in known.inputs

    def _committed_input(self, token: int) -> Input:
        """A row that stays without a feature reads what it read before."""
        known = self._committed
        if (feature := known.feature(token)) is not None:
            known.inputs.pop(token, None)
            return feature
        if token not in known.inputs:
            known.inputs[token] = self._substitute(token)
        return known.inputs[token]

    def _substitute(self, token: int) -> Input:
        """For the feature that the row of this token behind committed ones lacks."""
        last, output = self._tip
        return output if last == token - 1 else None

    def _take(self, rest: list[tuple[int, int]], inputs: list[Input], *, waits: bool) -> list[_ReadingRow]:
        """Take the first nodes out of `rest` that one forward evaluates, and add their inputs. Nodes without an
        ancestor to go on from get their numbers, and no rows. `waits`: the last committed row is in this forward."""
        taken: list[_ReadingRow] = []
        blocked = self._committed.blocked and not waits
        while rest:
            token, parent = rest[0]
            above = self._tree.get(parent)
            row = _ReadingRow(token, parent)
            full = len(taken) >= self._rows.room
            if full or (blocked if above is None else not above.evaluated):
                if taken or waits:
                    break
                self._tree.add(row)
                self._rows.skip(1)
            elif self._read(row, above, waits=waits):
                row.evaluated = True
                self._tree.add(row)
                inputs.append(row.read)
                taken.append(row)
            else:
                break
            del rest[0]
        return taken

    def _read(self, row: _ReadingRow, above: _ReadingRow | None, *, waits: bool) -> bool:
        """Set what a row reads; False if that is the output of a row in the same forward."""
        end = len(self._committed.tokens)
        feature = self._committed.feature(end) if above is None else None
        if feature is not None:
            row.read, row.true = feature, True
        elif above is not None:
            row.read = above.output
            return above.output is not None
        elif waits:
            return False
        else:
            row.read = self._substitute(end)
        return True
