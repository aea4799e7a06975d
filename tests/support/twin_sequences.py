"""The same random operations on two sequences of draft engines, whose row numbers may differ."""

import random

import numpy as np
from numpy.typing import NDArray

from draft_worker.engine_interface import Batch, EngineSequence
from protocol.messages.sampling import Sampling
from protocol.speculation.token_tree import Candidates
from tests.support.models.tiny_models import VOCABULARY
from tests.support.processing import processors

GREEDY = Sampling()


class Twins:
    """Prefills, growth steps, commits and cuts of both, at random."""

    def __init__(
        self,
        one: EngineSequence,
        other: EngineSequence,
        seed: int,
        sampling: Sampling = GREEDY,
        vocabulary: int = VOCABULARY,
    ) -> None:
        self.sampling, self.vocabulary = sampling, vocabulary
        self.sequences = (one, other)
        self.source = random.Random(seed)
        self.nodes: dict[int, tuple[int, list[int], tuple[int, int]]] = {}
        """By a common number: parent, path from the root, the rows."""
        self.tokens: list[int] = []
        self.count = 0

    def prefill(self, count: int) -> None:
        tokens = [self.source.randrange(self.vocabulary) for _ in range(count)]
        self.tokens += tokens
        for sequence in self.sequences:
            sequence.prefill(tokens)

    def evaluate(self, count: int, committed: int = 0) -> tuple[list[Candidates], list[Candidates]]:
        one, other = self.batches(count, committed)
        return self.sequences[0].evaluate(one), self.sequences[1].evaluate(other)

    def batches(self, count: int, committed: int = 0) -> tuple[Batch, Batch]:
        """New nodes below earlier nodes, below new ones, or below the prefix."""
        behind = [self.source.randrange(self.vocabulary) for _ in range(committed)]
        self.tokens += behind
        begins = [sequence.next_row + committed for sequence in self.sequences]
        fresh: list[int] = []
        tokens, parents = [], ([], [])
        for index in range(count):
            parent = self.source.choice([-1, *self.nodes])
            token = self.source.randrange(self.vocabulary)
            path = [*(self.nodes[parent][1] if parent >= 0 else []), token]
            for side in (0, 1):
                parents[side].append(self.nodes[parent][2][side] if parent >= 0 else -1)
            self.nodes[self.count] = (parent, path, (begins[0] + index, begins[1] + index))
            fresh.append(self.count)
            self.count += 1
            tokens.append(token)
        wanted = processors(self.sampling, self.tokens)
        paths = [self.nodes[number][1] for number in fresh]
        one, other = (Batch(behind, tokens, parents[side], 4, wanted, paths) for side in (0, 1))
        return one, other

    def keep(self) -> None:
        """Commit a random path from the root and keep what is below it."""
        path: list[int] = []
        below = -1
        while children := [number for number, (parent, *_) in self.nodes.items() if parent == below]:
            below = self.source.choice(children)
            path.append(below)
            if self.source.random() < 0.5:
                break
        surviving = [number for number in self.nodes if number not in path and self._descends(number, below)]
        for side, sequence in enumerate(self.sequences):
            rows = [[self.nodes[number][2][side] for number in group] for group in (path, surviving)]
            sequence.keep(rows[0], rows[1])
        self.tokens += [self.nodes[number][1][-1] for number in path]
        self.nodes = {number: self._cut(number, len(path), below) for number in surviving}

    def _descends(self, number: int, ancestor: int) -> bool:
        while number != ancestor and number >= 0:
            number = self.nodes[number][0]
        return number == ancestor

    def _cut(self, number: int, length: int, root: int) -> tuple[int, list[int], tuple[int, int]]:
        parent, path, rows = self.nodes[number]
        return (-1 if parent == root else parent, path[length:], rows)

    def feed(self, first: int, rows: NDArray[np.float32]) -> None:
        """Features of committed tokens, which both read."""
        for sequence in self.sequences:
            sequence.feed(first, rows)
            while sequence.unread:
                sequence.read(8)

    def truncate(self, length: int) -> None:
        for sequence in self.sequences:
            sequence.truncate(length)
            # A recurrent state may go back further.
            if missing := self.tokens[sequence.committed : length]:
                sequence.prefill(missing)
        self.nodes = {}
        del self.tokens[length:]
