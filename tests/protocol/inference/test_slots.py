"""The slot table against a model that records the token of every slot."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.inference.slots import PREFIX, SlotTable


class _Remembering:
    """A slot table beside the paths its rows stand for; a path is a tuple of unique token numbers."""

    def __init__(self) -> None:
        self.table = SlotTable()
        self.slots: list[int] = []
        self.committed: tuple[int, ...] = ()
        self.paths: dict[int, tuple[int, ...]] = {}
        self.tokens = 0

    def append(self, count: int) -> None:
        if self.table.dead:
            self.compact()
        self.committed += self._write(self.table.size, count)
        self.table.append(count)

    def evaluate(self, choices: list[int]) -> None:
        first = self.table.next_row
        parents = []
        for offset, choice in enumerate(choices):
            candidates = [PREFIX, *self.paths, *range(first, first + offset)]
            parents.append(candidates[choice % len(candidates)])
        unmasked = len(parents) == 1 and self.table.only_dead_slots_mask(parents[0])
        if unmasked:
            self.compact()
        begin = self.table.size
        rows = self.table.add(parents)
        assert self.table.continues(rows) or not unmasked
        written = self._write(begin, len(parents))
        for offset, parent in enumerate(parents):
            above = self.committed if parent == PREFIX else self.paths[parent]
            self.paths[first + offset] = (*above, written[offset])
        for row, offset in zip(rows, range(len(rows)), strict=True):
            path = self.paths[first + offset]
            seen = np.flatnonzero(self.table.mask(rows)[offset])
            assert tuple(self.slots[slot] for slot in seen) == path
            assert row.position == len(path) - 1
        if self.table.continues(rows):
            assert np.array_equal(self.table.mask(rows), np.tri(len(rows), self.table.size, begin, dtype=bool))

    def keep(self, choice: int, drop: int) -> None:
        numbers = sorted(self.paths)
        chosen = self.paths[numbers[choice % len(numbers)]] if numbers and choice % 5 else self.committed
        path = [number for number in numbers if self.paths[number] == chosen[: len(self.paths[number])]]
        below = [number for number in numbers if number not in path and self.paths[number][: len(chosen)] == chosen]
        lost = [number for index, number in enumerate(below) if (index + drop) % 4 == 0]
        kept = [number for number in below if not any(self._under(number, other) for other in lost)]
        self.committed = chosen
        self.paths = {number: self.paths[number] for number in kept}
        self.table.keep(path, kept)

    def truncate(self, choice: int) -> None:
        length = len(self.committed) - choice % 3
        if length >= 0:
            self.committed, self.paths = self.committed[:length], {}
            self.table.truncate(length)

    def compact(self) -> None:
        begin, slots = self.table.compact()
        self.slots[begin : begin + len(slots)] = [self.slots[slot] for slot in slots]
        assert self.table.dead == 0

    def _under(self, number: int, other: int) -> bool:
        return self.paths[number][: len(self.paths[other])] == self.paths[other]

    def _write(self, begin: int, count: int) -> tuple[int, ...]:
        fresh = tuple(range(self.tokens, self.tokens + count))
        self.tokens += count
        self.slots[begin:] = fresh
        return fresh


_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("evaluate"), st.lists(st.integers(0, 999), min_size=1, max_size=8)),
        st.tuples(st.just("keep"), st.integers(0, 999), st.integers(0, 3)),
        st.tuples(st.just("truncate"), st.integers(0, 2)),
        st.tuples(st.just("append"), st.integers(1, 300)),
        st.tuples(st.just("compact")),
    ),
    max_size=24,
)


@given(_STEPS)
@settings(max_examples=150, derandomize=True)
def test_every_row_sees_its_own_path_and_nothing_else(steps: list[tuple]):
    memory = _Remembering()
    for name, *arguments in steps:
        if name == "append":
            memory.keep(0, 0)
            memory.truncate(0)
        if name != "compact" or memory.table.dead:
            getattr(memory, name)(*arguments)
    memory.evaluate([0])


def test_dropped_rows_behind_the_last_kept_one_cost_nothing():
    table = SlotTable()
    table.append(5)
    table.add([PREFIX, 0, 1, 2])
    table.keep([0, 1], [])

    assert (table.size, table.dead) == (7, 0)


def test_a_row_number_stays_valid_when_its_row_is_committed():
    table = SlotTable()
    table.add([PREFIX, 0])
    table.keep([0, 1], [])

    assert table.add([1])[0].position == 2
