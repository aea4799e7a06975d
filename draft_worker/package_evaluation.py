"""A batch of one sequence on a converted model, in one call or several. Knows no cache and makes no calls."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from draft_worker.candidates.selector import CandidateSelector
from draft_worker.coreml.arrays import Single
from draft_worker.coreml.runtime.tree_slots import PREFIX
from draft_worker.engine import Batch
from protocol.messages.sampling import Sampling
from protocol.speculation.candidates import Candidates


class EvaluatedSequence(Protocol):
    """What an evaluation needs of its sequence."""

    @property
    def next_row(self) -> int: ...

    def position(self, row: int) -> int: ...

    def keep(self, path: Sequence[int], surviving: Iterable[int]) -> None: ...


class Evaluation:
    """The rows of one batch, and the candidates found so far. A call evaluates some of the rows, or all."""

    def __init__(
        self, sequence: EvaluatedSequence, selector: CandidateSelector, sampling: Sampling, batch: Batch
    ) -> None:
        first = sequence.next_row
        self._path = range(first, first + len(batch.committed))
        tip = self._path[-1] if self._path else PREFIX
        self.tokens = [*batch.committed, *batch.tokens]
        self.parents = [*chain(self._path), *(tip if parent == PREFIX else parent for parent in batch.parents)]
        self._nodes = range(self._path.stop, first + len(self.parents))
        self._found = {node: Candidates([], []) for node in self._nodes}
        self._sequence = sequence
        self._selector = selector
        self._sampling = sampling
        self._batch = batch

    def begin(self, numbers: Sequence[int]) -> None:
        """A call of these rows comes: start to draw the noise that their candidates need."""
        self._selector.begin(self._sampling, self._positions(self._wanted(numbers)))

    def end(self, numbers: Sequence[int], logits: Single) -> None:
        """Find candidates in the logits of these rows, which may be overwritten. There may be no node among them."""
        wanted, batch, first = self._wanted(numbers), self._batch, self._nodes.start
        if not wanted:
            return
        part = batch._replace(
            fans=[batch.fans[number - first] for number in wanted] if batch.fans else (),
            paths=[batch.paths[number - first] for number in wanted] if batch.paths else (),
        )
        behind = logits[len(numbers) - len(wanted) :]
        found = self._selector.select(behind, self._positions(wanted), self._sampling, part)
        self._found.update(zip(wanted, found, strict=True))

    def candidates(self) -> list[Candidates]:
        """Those of all nodes. Commits the batch's committed tokens."""
        if self._path:
            self._sequence.keep(self._path, self._nodes)
        return list(self._found.values())

    def _wanted(self, numbers: Sequence[int]) -> list[int]:
        """The nodes among these rows, which are the last ones."""
        return [number for number in numbers if number in self._found]

    def _positions(self, rows: Sequence[int]) -> list[int]:
        """Of the tokens behind these rows, in the conversation."""
        return [self._sequence.position(row) + 1 + self._batch.skipped for row in rows]


def chain(numbers: range) -> list[int]:
    """Parents of consecutive rows; the first row follows the committed prefix."""
    return [PREFIX, *numbers[:-1]] if numbers else []
