"""The interface of a draft engine: base classes whose defaults fit an engine without a model. Knows no growth plans.

Each module of draft_worker.engines holds one engine and declares it (`EngineDeclaration`).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from protocol.messages.base import MAX_CONTEXT
from protocol.messages.features import FeatureForm
from protocol.messages.sampling import Sampling
from protocol.messages.worker import Start
from protocol.speculation.token_tree import Candidates

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    # These modules import MLX, which some engines don't need.
    from protocol.sampling.grammar import Grammars
    from protocol.sampling.logits_processors import LogitsProcessors

ANY_TOKEN = 1 << 20
"""The vocabulary of an engine that accepts any tokens."""


class Batch(NamedTuple):
    """The input of one forward: tokens that join the committed prefix, then tree nodes that need candidates.

    They take the row numbers `next_row`, `next_row + 1`, ... of the sequence, in this order.
    """

    committed: Sequence[int]
    """Tokens that were accepted before the draft evaluated them; usually none."""
    tokens: Sequence[int]
    parents: Sequence[int]
    """Row of each node's parent, which may be in this batch. -1: the parent is the end of the committed prefix."""
    limit: int
    """Candidates wanted for each node."""
    processors: "LogitsProcessors | None" = None
    """None: no processor changes the logits of this request."""
    paths: Sequence[Sequence[int]] = ()
    """For each node, the tokens behind the root up to and with the node. Empty without processors."""
    followers: Sequence[Sequence[tuple[int, float]]] = ()
    """For each node, tokens that followed its last tokens earlier in the text, with probabilities that sum to less than
    1: prompt lookup, which candidates are mixed with. Empty without it."""
    skipped: int = 0
    """Tokens of the conversation that the sequence does not hold (`RollingContext`). Noise is drawn by the positions of
    the conversation."""


class EngineSequence(ABC):
    """One sequence's KV: a committed prefix, then rows of tree nodes whose numbers stay valid until dropped."""

    copyable: bool = False
    """Whether `reopen` can copy the KV while this sequence goes on serving its own request."""
    step_nodes: int | None = None
    """Most nodes of a best-first growth step, for a sequence that evaluates paths one by one; None: no bound."""

    @property
    @abstractmethod
    def committed(self) -> int:
        """Tokens of the committed prefix."""

    @property
    @abstractmethod
    def next_row(self) -> int: ...

    @abstractmethod
    def prefill(self, tokens: Sequence[int]) -> None:
        """Append tokens to the committed prefix, in one forward. There must be no rows."""

    @abstractmethod
    def evaluate(self, batch: Batch) -> list[Candidates]:
        """One forward; the candidates behind each node."""

    @property
    def forward_widths(self) -> Sequence[int] | None:
        """Tokens of each forward that the last `evaluate` ran; None: one over the tokens that it was given."""
        return None

    @abstractmethod
    def keep(self, path: Sequence[int], surviving: Iterable[int]) -> None:
        """Commit the rows of `path` in order, keep those in `surviving`, drop the rest."""

    @abstractmethod
    def truncate(self, length: int) -> None:
        """Drop all rows, and the committed tokens behind `length`, or a few more: see `reach`."""

    def feed(self, first: int, rows: "NDArray[np.float32]") -> None:
        """Take the target's features, (tokens, outputs * width), finite and within half precision, of the committed
        tokens from index `first` on, for the next forwards. Features of tokens that are not committed yet, or of
        outputs that differ, are never fed."""
        raise AssertionError("this draft reads no features")

    @property
    def unread(self) -> bool:
        """Whether so many fed features wait that they need forwards of their own, which `read` computes."""
        return False

    def read(self, most: int) -> int:
        """Forwards over at most `most` committed tokens whose features were fed. Returns how many tokens they were."""
        raise AssertionError("this draft reads no features")

    @property
    def staleness(self) -> int:
        """Committed tokens behind the last one whose features were fed."""
        return 0

    def reach(self, tokens: int) -> int:
        """The most of the first `tokens` committed tokens whose KV remains after `truncate`."""
        return tokens

    @property
    def memory(self) -> int:
        """Bytes of KV; 0 if there is no KV to keep."""
        return 0

    def shed(self) -> bool:
        """Forget one state to which `truncate` could go back. Whether there was one."""
        return False

    def shorten(self, tokens: int) -> None:
        """`truncate`, and free memory of what is dropped, where that is possible."""
        self.truncate(tokens)

    def reopen(self, length: int, sampling: Sampling, vocabulary: int, *, exclusive: bool) -> "EngineSequence":
        """A sequence for another request, as from `Engine.open`, that holds the first `length` committed tokens.

        `exclusive`: this sequence's own request has ended, and only the result may be used from now on. Otherwise
        this sequence must be `copyable` and does not change. The default fits a sequence that does not depend on the
        sampling.
        """
        assert exclusive, "a sequence that is not copyable serves one request at a time"
        self.truncate(length)
        return self

    def close(self) -> None:
        """The sequence has ended: release its resources."""
        return


class Engine(ABC):
    """A loaded draft. A subclass sets `name` and `architecture`."""

    name: str
    model: str = ""
    """Folder of the model; empty without a model."""
    architecture: str
    vocabulary: int = ANY_TOKEN
    """The engine knows the tokens below this number."""
    context: int = MAX_CONTEXT
    """The engine evaluates the positions below this number."""
    device: str = "cpu"
    tokenizer: str = ""
    """Fingerprint of the model's tokenizer; empty for an engine that accepts any tokens."""
    joint: bool = False
    """Whether one forward can grow the trees of several sequences, as far as `joins` allows."""
    features: FeatureForm | None = None
    """What its sequences read of the target; None: tokens alone."""
    grammars: "Grammars | None" = None
    """Of the model's tokenizer, for an engine whose candidates follow a request's logits processors."""
    costs: tuple[tuple[int, float], ...] = ()
    """Seconds of a forward by its tokens, as measured after loading; empty if nothing was measured."""
    block: int = 1
    """Tokens behind one another that a forward guesses."""

    expected: float = 0.0
    """Share of right first guesses that `doctor` found; 0 if it was not asked."""

    @abstractmethod
    def open(self, sampling: Sampling, vocabulary: int) -> EngineSequence:
        """A new, empty sequence for a request that a target of `vocabulary` tokens samples by `sampling`."""

    def measured(self, loading: float, identity: str) -> tuple[tuple[int, float], ...]:
        """`costs` of an engine that took `loading` seconds to load, where that is worth its time. `identity`: as
        `costs_at_load` takes it."""
        return ()

    def processors(self, start: Start) -> "LogitsProcessors | None":
        """The logits processors of a sequence at `start`; None if it needs none, or the engine has no `grammars`."""
        if self.grammars is None:
            return None
        # This module imports MLX, which some engines don't need.
        from protocol.sampling.logits_processors import LogitsProcessors

        return LogitsProcessors.wanted(start, self.grammars, lenient=True)

    def joins(self, parts: Sequence[tuple[Any, int]]) -> bool:
        """Whether one forward can evaluate so many new rows of each of these sequences. The default fits an engine
        whose forwards have no bound."""
        return self.joint

    def evaluate_together(self, parts: Sequence[tuple[Any, Batch]]) -> list[list[Candidates]]:
        """`EngineSequence.evaluate` of different sequences of this engine; in one forward if it `joins` them."""
        return [sequence.evaluate(batch) for sequence, batch in parts]


class TokenRow:
    """A row of the tree: its token, and the number of the row before it.

    A parent that is not in the tree any more is the end of the committed prefix.
    """

    def __init__(self, token: int, parent: int) -> None:
        self.token = token
        self.parent = parent


RowT = TypeVar("RowT", bound=TokenRow)


class RowTree(Generic[RowT]):
    """Rows by their numbers, as `EngineSequence` numbers them: in the order in which they were added, for good."""

    def __init__(self) -> None:
        self.next_row = 0
        self._rows: dict[int, RowT] = {}

    def __bool__(self) -> bool:
        return bool(self._rows)

    def __getitem__(self, number: int) -> RowT:
        return self._rows[number]

    def get(self, number: int) -> RowT | None:
        """None: a row that was committed, or none at all."""
        return self._rows.get(number)

    def add(self, row: RowT) -> None:
        """Give `row` the next number."""
        self._rows[self.next_row] = row
        self.next_row += 1

    def skip(self, count: int) -> None:
        """Give the next `count` numbers to no row."""
        self.next_row += count

    def path(self, number: int) -> Iterator[RowT]:
        """The row of this number and its ancestors, nearest first, up to the committed prefix."""
        while (row := self._rows.get(number)) is not None:
            yield row
            number = row.parent

    def keep(self, path: Sequence[int], surviving: Iterable[int]) -> list[RowT]:
        """Take the rows of `path` out of the tree and return them; drop all others that are not `surviving`."""
        taken = [self._rows[number] for number in path]
        self._rows = {number: self._rows[number] for number in surviving}
        return taken

    def clear(self) -> None:
        self._rows = {}
