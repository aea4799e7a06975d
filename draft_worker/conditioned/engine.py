"""The engine of every drafter whose rows read features: sequences, joint forwards, candidates. Knows no checkpoint.

What the engines `eagle3` and `mtp` share.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar

import mlx.core as mx
import numpy as np

from draft_worker.candidates.head_columns import Columns, ColumnsEngine, ContextColumns, widened
from draft_worker.conditioned.committed_rows import CommittedRows
from draft_worker.conditioned.runner import ConditionedRunner, Input, Wave
from draft_worker.engine_interface import Batch, EngineSequence, RowTree, TokenRow
from protocol.contracts.tokenizer_fingerprint import vocabulary_fingerprint
from protocol.inference.forward_costs import costs_at_load
from protocol.inference.joint_forward import ForwardPart
from protocol.inference.tree_sequence import TreeSequence
from protocol.messages.sampling import Sampling
from protocol.speculation.token_tree import Candidates
from protocol.worker.process import WorkerSetup

if TYPE_CHECKING:
    from numpy.typing import NDArray

_Result = TypeVar("_Result")
MOST_TOGETHER = 16
"""So many committed tokens whose features were fed join the next forward. More of them have forwards of their own."""
Outputs: TypeAlias = Sequence[mx.array | None]
"""By node of a batch: (width,), or None for a node that could not be evaluated."""


class ConditionedEngine(ColumnsEngine):
    """A drafter whose rows read features."""

    def __init__(self, name: str, folder: Path, runner: ConditionedRunner, tokenizer: str, tokens: Path) -> None:
        """`tokenizer`: the fingerprint of the tokenizer, which lies in the folder `tokens`."""
        self.name = name
        self.model = str(folder)
        self.architecture = runner.architecture
        self.set_up_columns(tokens, runner.vocabulary, runner.head_tokens)
        self.context = runner.context
        self.device = str(mx.default_device())
        self.tokenizer = tokenizer
        self.features = runner.features
        self.joint = runner.joint
        self._runner = runner

    @classmethod
    def load(cls, setup: WorkerSetup, load_runner: Callable[[Path, Path | None], ConditionedRunner]) -> Self:
        """`load_runner`: from the folders of the drafter and of its target, if that is another one. Raises InputError
        as it does."""
        folder, target = Path(setup.model), Path(setup.target) if setup.target else None
        runner, tokens = load_runner(folder, target), target or folder
        return cls(setup.engine, folder, runner, vocabulary_fingerprint(tokens), tokens)

    def measured(self, loading: float, identity: str) -> tuple[tuple[int, float], ...]:
        return costs_at_load(self._runner.model, loading, identity).by_width

    def open(self, sampling: Sampling, vocabulary: int) -> "ConditionedSequence":
        return self.around(self.rows(), sampling, vocabulary)

    def rows(self) -> TreeSequence:
        """Of a new, empty sequence."""
        return self._runner.open()

    def around(self, rows: TreeSequence, sampling: Sampling, vocabulary: int) -> "ConditionedSequence":
        """A sequence with these rows."""
        return ConditionedSequence(self, rows, sampling, self.columns(vocabulary))

    @property
    def widens(self) -> bool:
        """Whether tokens of a context that the head lacks can be guessed."""
        return self._runner.short_head is not None and self._runner.short_head.widens

    def evaluate_together(self, parts: Sequence[tuple["ConditionedSequence", Batch]]) -> list[list[Candidates]]:
        sequences = [sequence for sequence, _ in parts]
        for sequence, batch in parts:
            sequence.columns.see([*batch.committed, *batch.tokens])
        runs = [sequence.forwards(batch) for sequence, batch in parts]
        if self.joint:
            outputs = self.run(sequences, runs)
        else:
            outputs = [self.run([each], [run])[0] for each, run in zip(sequences, runs, strict=True)]
        stacked = mx.stack([self._runner.blank if row is None else row for rows in outputs for row in rows])
        more = widened(self._runner.short_head, [sequence.columns for sequence in sequences])
        logits = self._runner.logits(stacked)
        found, first = [], 0
        for rows, (sequence, batch) in zip(outputs, parts, strict=True):
            own = sequence.columns.own(logits[first : first + len(rows)], more)
            found.append(sequence.candidates(own, rows, batch))
            first += len(rows)
        return found

    def run(
        self, sequences: Sequence["ConditionedSequence"], runs: Sequence[Generator[Wave, mx.array, _Result]]
    ) -> list[_Result]:
        """Run the forwards of different sequences, the first ones together, then the second ones, and so on."""
        results: dict[int, Any] = {}
        for sequence in sequences:
            sequence.ran = []
        waves: dict[int, Wave] = {}
        sent: dict[int, mx.array | None] = dict.fromkeys(range(len(runs)))
        while sent:
            waves.clear()
            for number, outputs in sent.items():
                try:
                    waves[number] = runs[number].send(outputs) if outputs is not None else next(runs[number])
                except StopIteration as stop:
                    results[number] = stop.value
            for number, wave in waves.items():
                sequences[number].ran.append(len(wave.inputs))
            sent = dict(zip(waves, self._runner.forward(list(waves.values())) if waves else (), strict=True))
        return [results[number] for number in range(len(runs))]


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


class ConditionedSequence(EngineSequence):
    """Committed tokens, with features as far as they were fed, a tree behind them, and the sampling of a request.

    A node behind too many tokens without rows is not evaluated.
    """

    copyable = True

    def __init__(self, engine: ConditionedEngine, rows: TreeSequence, sampling: Sampling, columns: Columns) -> None:
        """`rows`: empty."""
        self.ran: list[int] = []
        """Tokens of each forward since the last `evaluate` or `read` began."""
        self.columns = ContextColumns(columns, widens=engine.widens)
        self._engine = engine
        self._sampling = sampling
        self._rows = rows
        self._known = CommittedRows()
        self._tree = RowTree[_ReadingRow]()
        self._tip: tuple[int, mx.array | None] = (-1, None)
        """The last committed token with a row, and the row's output."""

    @property
    def committed(self) -> int:
        return len(self._known.tokens)

    @property
    def next_row(self) -> int:
        return self._tree.next_row

    @property
    def forward_widths(self) -> Sequence[int]:
        return self.ran

    def prefill(self, tokens: Sequence[int]) -> None:
        """Commits the tokens; their rows are computed when features are there."""
        self.columns.see(tokens)
        self._known.tokens += tokens

    def evaluate(self, batch: Batch) -> list[Candidates]:
        return self._engine.evaluate_together([(self, batch)])[0]

    def forwards(self, batch: Batch) -> Generator[Wave, mx.array, Outputs]:
        """The forwards that evaluate a batch, one after the other: takes the (L, width) outputs of each."""
        self._known.tokens += batch.committed
        self._skip(len(batch.committed))
        first, count = self.next_row, len(self._known.tokens)
        yield from self._waves(count, list(zip(batch.tokens, batch.parents, strict=True)))
        return [self._tree[row].output for row in range(first, self.next_row)]

    def candidates(self, logits: mx.array, outputs: Outputs, batch: Batch) -> list[Candidates]:
        """From the (L, head) `logits` of a batch's nodes; none behind a node without an output."""
        nodes = range(self.next_row - len(batch.tokens), self.next_row)
        # Of a node that was not evaluated, any position.
        depths = [self._rows.position(node) + 1 if self._tree[node].evaluated else 0 for node in nodes]
        positions = [depth + 1 + batch.skipped for depth in depths]
        found = self.columns.now.propose(logits, positions, self._sampling, batch)
        nothing = Candidates([], [])
        return [nothing if row is None else each for each, row in zip(found, outputs, strict=True)]

    def feed(self, first: int, rows: "NDArray[np.float32]") -> None:
        form = self._engine.features
        assert form is not None
        if rows.ndim == 2 and rows.shape[1] == form.elements:
            self._known.feed(first, rows)

    @property
    def unread(self) -> bool:
        return self._known.waiting > MOST_TOGETHER

    def read(self, most: int) -> int:
        self._engine.run([self], [self._reading(most)])
        if self._tip[1] is not None:
            # MLX builds the forwards first.
            mx.eval(self._tip[1])
        return sum(self.ran)

    @property
    def staleness(self) -> int:
        return self.committed - 1 - self._known.newest

    def keep(self, path: Sequence[int], surviving: Iterable[int]) -> None:
        surviving, known = tuple(surviving), self._known
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
        self._known.truncate(length)
        self._tree.clear()
        self._rows.truncate(self._known.end - self._known.start)
        if self._tip[0] >= self._known.end:
            self._tip = (-1, None)

    @property
    def memory(self) -> int:
        return self._rows.memory + self._known.memory

    def reopen(self, length: int, sampling: Sampling, vocabulary: int, *, exclusive: bool) -> "ConditionedSequence":
        if exclusive:
            opened = self._engine.around(self._rows, sampling, vocabulary)
            opened._known, opened._tree = self._known, self._tree
        else:
            known = self._known.copy(length)
            count = known.end - known.start
            rows = self._rows.copy(count) if count else self._engine.rows()
            opened = self._engine.around(rows, sampling, vocabulary)
            opened._known = known
        opened._tip = self._tip
        opened.truncate(length)
        opened.columns.see(self.columns.tokens)
        return opened

    def _reading(self, most: int) -> Generator[Wave, mx.array, None]:
        """The forward over at most `most` committed tokens whose features were fed; over more if there are nodes, whose
        committed ancestors must not lack rows."""
        due = self._known.due
        if due is not None:
            whole, some = len(self._known.tokens), due.first + self._known.readable(due.first, most)
            yield from self._waves(whole if self._tree else some, [])

    def _skip(self, count: int) -> None:
        """Give the next `count` row numbers to no row."""
        self._tree.skip(count)
        self._rows.skip(count)

    def _waves(self, stop: int, nodes: Sequence[tuple[int, int]]) -> Generator[Wave, mx.array, None]:
        """Rows of the committed tokens that are due before `stop`, then those of `nodes`, (token, parent) each.

        A row whose input is the output of another row waits for the wave behind that row's.
        """
        known, due, rest = self._known, self._known.due, list(nodes)
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
            part = ForwardPart(self._rows, tokens, [row.parent for row in taken], first)
            outputs = yield Wave(part, inputs)
            if at > begin:
                self._tip = at - 1, outputs[at - begin - 1]
                known.computed(at)
            for place, row in enumerate(taken, start=at - begin):
                row.output = outputs[place]

    def _restart(self, token: int) -> None:
        self._known.restart(token)
        self._rows.restart(token - 1)
        self._tip = (-1, None)

    def _is_ready(self, token: int) -> bool:
        """Whether the row of a committed token can share a forward with the row before it."""
        known = self._known
        return known.feature(token) is not None or token in known.inputs

    def _committed_input(self, token: int) -> Input:
        """A row that stays without a feature reads what it read before."""
        known = self._known
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
        blocked = self._known.blocked and not waits
        while rest:
            token, parent = rest[0]
            above = self._tree.get(parent)
            row = _ReadingRow(token, parent)
            if blocked if above is None else not above.evaluated:
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
        end = len(self._known.tokens)
        feature = self._known.feature(end) if above is None else None
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
