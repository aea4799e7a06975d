"""A draft that is a pure function of the path, behind an engine that checks how its rows are used."""

import random
from collections.abc import Iterable, Sequence

from draft_worker.engine_interface import Batch, Engine, EngineSequence
from protocol.messages.sampling import Sampling
from protocol.speculation.token_tree import Candidates

VOCABULARY = 50


def oracle(path: Sequence[int], limit: int) -> Candidates:
    """The candidates after a path of tokens: geometric probabilities over tokens that the path decides."""
    source = random.Random(repr(list(path)))
    limit = min(limit, VOCABULARY)
    sharpness = source.uniform(0.3, 0.9)
    tokens = source.sample(range(VOCABULARY), VOCABULARY)[:limit]
    return Candidates(tokens, [sharpness * (1 - sharpness) ** rank for rank in range(limit)])


class FakeSequence(EngineSequence):
    """Rows remember their whole path; anything a model's KV could not do fails here."""

    copyable = True

    def __init__(self) -> None:
        self.prefix: list[int] = []
        self.paths: dict[int, list[int]] = {}
        self._next_row = 0
        self.forwards: list[int] = []
        """Tokens of every forward, prefills as negative numbers."""
        self.evaluated: list[tuple[int, ...]] = []
        """Whole paths of the nodes that were asked about."""
        self.followers: list[Sequence[tuple[int, float]]] = []
        """What prompt lookup guessed behind them."""

    @property
    def committed(self) -> int:
        return len(self.prefix)

    @property
    def next_row(self) -> int:
        return self._next_row

    def prefill(self, tokens: Sequence[int]) -> None:
        assert not self.paths
        self.prefix += tokens
        self.forwards.append(-len(tokens))

    def evaluate(self, batch: Batch) -> list[Candidates]:
        if batch.committed:
            assert not self.paths
            self.prefix = [*self.prefix, *batch.committed]
            self._next_row += len(batch.committed)
        asked = []
        for token, parent in zip(batch.tokens, batch.parents, strict=True):
            self.paths[self._next_row] = [*(self.prefix if parent == -1 else self.paths[parent]), token]
            asked.append(self.paths[self._next_row])
            self._next_row += 1
        self.forwards.append(len(batch.committed) + len(batch.tokens))
        self.evaluated += [tuple(path) for path in asked]
        self.followers += batch.followers
        return [oracle(path, batch.limit) for path in asked]

    def keep(self, path: Sequence[int], surviving: Iterable[int]) -> None:
        for row in path:
            assert self.paths[row][:-1] == self.prefix
            self.prefix = self.paths[row]
        self.paths = {row: self.paths[row] for row in surviving}
        assert all(kept[: len(self.prefix)] == self.prefix for kept in self.paths.values())

    def truncate(self, length: int) -> None:
        assert length <= len(self.prefix)
        self.prefix = self.prefix[:length]
        self.paths = {}

    @property
    def memory(self) -> int:
        return len(self.prefix)

    def reopen(self, length: int, sampling: Sampling, vocabulary: int, *, exclusive: bool) -> "FakeSequence":
        other = type(self).__new__(type(self))
        vars(other).update(vars(self), paths={}, _next_row=0, evaluated=[])
        other.prefix = self.prefix[:length]
        if exclusive:
            # A caller that still uses the old sequence fails.
            self.prefix, self.paths = [], {}
        return other


class FakeEngine(Engine):
    name = model = architecture = device = tokenizer = "fake"
    vocabulary = VOCABULARY

    def __init__(self, context: int = 10_000) -> None:
        self.context = context
        self.opened: list[FakeSequence] = []

    def open(self, sampling: Sampling, vocabulary: int) -> FakeSequence:
        self.opened.append(FakeSequence())
        return self.opened[-1]
