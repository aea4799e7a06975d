"""The states of a recurrence and of short convolutions, with the inputs of rows that are not committed."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Self

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache

from protocol.inference.layer_cache import ForwardShape
from protocol.inference.layer_caches.state import FoldingCache
from protocol.inference.recurrence import Recurrence, ShortConvolution, Unrolled, ancestry, reads, state_behind

initialise_arrays: Callable[[ArraysCache, int], None] = vars(ArraysCache)["__init__"]
"""Its `__init__`, which mlx-lm does not annotate."""
_TOKENS = 1
"""The axis of tokens in the inputs of a convolution."""


@dataclass(eq=False)
class _Row:
    """A token of a forward."""

    forward: "_Forward"
    number: int
    """Among the forward's tokens."""
    before: "_Row | None"
    """None: the token that was committed last when the row was made."""


class _Call:
    """A recurrence or a convolution in a forward, and its inputs."""

    def __init__(self, made: Recurrence | ShortConvolution, inputs: dict[str, Any], axis: int) -> None:
        self.made = made
        self.inputs = inputs
        self.axis = axis
        self.state: Any = None
        """What the layer is given as the state behind the last token."""
        self.unrolled: Unrolled | None = None
        """The recurrence over the forward's earlier rows and its own."""


class _Forward:
    """Calls over the rows of a forward."""

    def __init__(self, earlier: Sequence[_Row], before: Sequence[int], direct: bool, begin: int) -> None:
        """`before[i]`: of all rows, earlier ones included, the index of the row before row i, or -1. `begin`: tokens in
        the state before them."""
        self.begin = begin
        self.skipped = len(earlier)
        self.earlier = earlier
        """Rows of other forwards on the paths of this one's, until the forward is built."""
        self.length = len(before) - len(earlier)
        self.direct = direct
        """The rows are one path behind the committed tokens."""
        self.ancestry = ancestry(tuple(before))
        self.calls: list[_Call] = []
        self.entries: dict[int, Any] = {}
        """What the layer left as its states."""
        self.ended = direct
        """These are the states behind the last row."""

    def inputs(self, name: str, array: mx.array, axis: int) -> mx.array:
        """With those of the earlier rows, in their order before its own."""
        return mx.concatenate([*_inputs(self.earlier, len(self.calls), name), array], axis=axis)


class _ReadArrays(ArraysCache):
    """Says whose layer is at work."""

    def __init__(self, owner: "RecurrentCache", size: int) -> None:
        initialise_arrays(self, size)
        self._owner = owner

    def __getitem__(self, index: int) -> Any:
        reads(self._owner)
        return self._owner.entries[index]

    def __setitem__(self, index: int, entry: Any) -> None:
        self._owner.put(index, entry)


class RecurrentCache(FoldingCache):
    """Evaluates a tree from the state of the committed tokens. A path that is committed is folded into the state from
    the recorded inputs, by mlx-lm's own recurrence."""

    def __init__(self, stock: Any) -> None:
        self.entries: list[Any] = list(stock.cache)
        """States behind the committed tokens."""
        super().__init__(_ReadArrays(self, len(stock.cache)))
        self._rows: dict[int, _Row] = {}
        """By slot."""
        self._tip: _Row | None = None
        """The row committed last."""
        self._forward: _Forward | None = None
        """The one in progress, unless its tokens are committed."""

    def prepare(self, forward: ForwardShape) -> None:
        super().prepare(forward)
        self._rows = {slot: row for slot, row in self._rows.items() if slot < forward.begin}
        self._forward = None
        if forward.parents is None:
            self._end += forward.length
            self._release()
            return
        self._forward = self._planned(forward.parents, forward.begin)

    def _planned(self, parents: Sequence[int], begin: int) -> _Forward:
        earlier: list[_Row] = []
        for slot in sorted({parent for parent in parents if 0 <= parent < begin}):
            known = {id(row) for row in earlier}
            earlier += [row for row in self._path(self._rows[slot]) if id(row) not in known]
        slots = {id(row): index for index, row in enumerate(earlier)}
        before = [slots.get(id(row.before), -1) for row in earlier]
        for parent in parents:
            if parent >= begin:
                before.append(len(earlier) + parent - begin)
            else:
                before.append(slots[id(self._rows[parent])] if parent >= 0 else -1)
        direct = not earlier and before == list(range(-1, len(before) - 1))
        forward = _Forward(earlier, before, direct, self._end)
        for index, parent in enumerate(parents):
            self._rows[begin + index] = _Row(forward, index, self._rows.get(parent))
        return forward

    def _path(self, row: _Row) -> list[_Row]:
        """The rows from the committed tokens to this one."""
        path: list[_Row] = []
        at: _Row | None = row
        while at is not None and at is not self._tip:
            path.insert(0, at)
            at = at.before
        return path

    # What the layer does.

    def put(self, index: int, entry: Any) -> None:
        """The layer's new state."""
        if self._forward is None:
            self.entries[index] = entry
            return
        self._forward.entries[index] = entry
        for call in self._forward.calls:
            if call.state is entry:
                call.made.entry = index

    def recur(self, recurrence: Recurrence, arguments: dict[str, Any]) -> tuple[mx.array, mx.array]:
        forward, kind = self._forward, recurrence.kind
        if forward is None:
            return recurrence.over_prompt(arguments)
        inputs = {name: arguments[name] for name in kind.inputs}
        unrolled = None
        if forward.direct and not recurrence.is_unrolled(forward.length):
            outputs, state = recurrence.run(arguments)
        else:
            forward.ended = False
            joined = {name: forward.inputs(name, array, kind.axis) for name, array in inputs.items()}
            unrolled = kind.over_tree({**arguments, **joined}, forward.ancestry)
            outputs = mx.split(unrolled.outputs, [forward.skipped], axis=kind.axis)[1]
            state = mx.zeros((0,))
        # Not the state before: a call outlives its forward.
        others = {name: argument for name, argument in arguments.items() if name not in (*inputs, kind.state)}
        call = _Call(recurrence, {**others, **inputs}, kind.axis)
        call.state, call.unrolled = state, unrolled
        forward.calls.append(call)
        return outputs, state

    def convolve(self, convolution: ShortConvolution, x: mx.array) -> mx.array:
        forward = self._forward
        if forward is None:
            return convolution.inner(x)
        width = x.shape[_TOKENS] - forward.length + 1
        state, rows = x[:, : width - 1], x[:, width - 1 :]
        outputs = convolution.inner(x) if forward.direct else self._convolved(convolution, forward, state, rows)
        forward.calls.append(_Call(convolution, {"x": rows}, _TOKENS))
        return outputs

    def _convolved(self, convolution: ShortConvolution, forward: _Forward, state: mx.array, rows: mx.array) -> mx.array:
        everything = mx.concatenate([state, forward.inputs("x", rows, _TOKENS)], axis=_TOKENS).squeeze(0)
        windows = forward.ancestry.windows(state.shape[_TOKENS] + 1)[len(forward.earlier) :]
        return convolution.inner(everything[windows]).swapaxes(0, 1)

    # What the sequence does.

    def finish(self) -> None:
        """Find the entry of each convolution: those of one form are called in the order of their entries.

        Raises LookupError if an entry is the state of no call.
        """
        forward = self._forward
        if forward is None or (forward.direct and forward.length == 1):
            return
        forward.earlier = ()
        recurrences = {call.made.entry for call in forward.calls if isinstance(call.made, Recurrence)}
        left = [index for index in sorted(forward.entries) if index not in recurrences]
        for call in forward.calls:
            if isinstance(call.made, ShortConvolution):
                form = call.inputs["x"].shape[-1]
                call.made.entry = next((index for index in left if forward.entries[index].shape[-1] == form), -1)
                left = [index for index in left if index != call.made.entry]
        if left or any(call.made.entry < 0 for call in forward.calls):
            raise LookupError("its layers fold tokens in a way of their own")

    def commit(self, slots: Sequence[int], surviving: Collection[int]) -> None:
        path = [self._rows[slot] for slot in slots]
        self._rows = {slot: row for slot, row in self._rows.items() if slot in surviving}
        if path:
            self._enter(path)
        if not self._rows:
            self._release()

    def _enter(self, path: Sequence[_Row]) -> None:
        """Bring the rows of a path into the states."""
        forward = path[-1].forward
        if forward.ended and [row.number for row in path if row.forward is forward] == list(range(forward.length)):
            for index, entry in forward.entries.items():
                self.entries[index] = entry
        else:
            self._fold(path)
        self._end += len(path)
        self._tip = path[-1]
        for row in path:
            # Rows that follow would keep all rows before them in memory.
            row.before = None

    def _fold(self, path: Sequence[_Row]) -> None:
        for number, call in enumerate(path[0].forward.calls):
            entry = call.made.entry
            if isinstance(call.made, ShortConvolution):
                rows = mx.concatenate(_inputs(path, number, "x"), axis=_TOKENS)
                self._shift(entry, rows, path[0].forward.entries[entry])
            else:
                self.entries[entry] = self._folded(path, number, self.entries[entry])

    def _folded(self, path: Sequence[_Row], number: int, state: Any) -> mx.array:
        """The state behind a path, of the call of this number."""
        forward = path[0].forward
        call = forward.calls[number]
        if call.unrolled and forward.begin == self._end and all(row.forward is forward for row in path):
            return state_behind(call.unrolled, mx.array([forward.skipped + row.number for row in path]), state)
        assert isinstance(call.made, Recurrence)
        kind, inputs = call.made.kind, dict(call.inputs)
        for name in kind.inputs:
            inputs[name] = mx.concatenate(_inputs(path, number, name), axis=call.axis)
        return call.made.run({**inputs, kind.state: state})[1]

    def _shift(self, entry: int, rows: mx.array, like: mx.array) -> None:
        """Append the inputs of a convolution to the last ones, of which there are as many as in `like`."""
        state = self.entries[entry]
        state = mx.zeros_like(like) if state is None else state
        whole = mx.concatenate([state, rows], axis=_TOKENS)
        self.entries[entry] = mx.contiguous(whole[:, whole.shape[_TOKENS] - like.shape[_TOKENS] :])

    def cut(self, tokens: int) -> None:
        super().cut(tokens)
        self._release()

    def _release(self) -> None:
        """The forwards' rows, with the states that they were given and made."""
        self._rows, self._tip, self._forward = {}, None, None

    def move(self, begin: int, slots: mx.array) -> None:
        moved = {slot: begin + index for index, slot in enumerate(np.array(slots).tolist())}
        self._rows = {moved.get(slot, slot): row for slot, row in self._rows.items() if slot < begin or slot in moved}

    def _saved(self) -> list[Any]:
        return list(self.entries)

    def _restore(self, state: list[Any]) -> None:
        self.entries = list(state)

    @property
    def arrays(self) -> list[mx.array]:
        return [entry for entry in self.entries if entry is not None]

    def copy(self, slots: int) -> Self:
        other = super().copy(slots)
        other._stock = _ReadArrays(other, len(self.entries))
        other._release()
        return other


def _inputs(rows: Sequence[_Row], call: int, name: str) -> list[mx.array]:
    """Inputs of a call, one array for each run of rows of one forward."""
    found: list[mx.array] = []
    for forward, run in groupby(rows, key=lambda row: row.forward):
        numbers, made = [row.number for row in run], forward.calls[call]
        if numbers == list(range(forward.length)):
            found.append(made.inputs[name])
        else:
            found.append(mx.take(made.inputs[name], mx.array(numbers), axis=made.axis))
    return found
