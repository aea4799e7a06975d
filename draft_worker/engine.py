"""What can guess: the interface of an engine. One module an engine; none knows messages or plans."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from draft_worker.loaded_model import LoadedModel
from protocol.messages.sampling import Sampling
from protocol.messages.worker import KvReference
from protocol.speculation.candidates import Candidates

if TYPE_CHECKING:
    # Imports MLX, which not every engine needs.
    from protocol.sampling.logits_processors import LogitsProcessors


class Batch(NamedTuple):
    """One forward: first tokens that join the committed prefix, then tree nodes that are asked about.

    They take the row numbers `next_row`, `next_row + 1`, ... of the sequence, in this order.
    """

    committed: Sequence[int]
    """Tokens that were accepted before they were ever evaluated; usually none."""
    tokens: Sequence[int]
    parents: Sequence[int]
    """Row of each node's parent, perhaps of this batch; -1 for directly behind the committed prefix."""
    contexts: Sequence[Sequence[int]]
    """The last `path_tokens` tokens of the path to each node, itself included; empty if that is 0."""
    limit: int
    """Candidates wanted of each node."""
    saguaro: float = 1.0
    """Factor on the probabilities of the `fans[i]` best tokens behind node i (rejection mode)."""
    fans: Sequence[int] = ()
    restraint: "LogitsProcessors | None" = None
    """What the sequence's past does to the logits behind each node."""
    paths: Sequence[Sequence[int]] = ()
    """Tokens between the root and each node, itself included; empty without a restraint."""


class EngineSequence(Protocol):
    """One sequence's KV: a committed prefix, then rows of tree nodes whose numbers stay valid until dropped."""

    path_tokens: int
    """How much of a node's path the engine wants to see."""

    @property
    def committed(self) -> int:
        """Tokens of the committed prefix."""
        ...

    @property
    def next_row(self) -> int: ...

    def prefill(self, tokens: Sequence[int]) -> None:
        """Append tokens to the committed prefix, in one forward. There must be no rows."""
        ...

    def evaluate(self, batch: Batch) -> list[Candidates]:
        """One forward; what may follow each node."""
        ...

    def keep(self, path: Sequence[int], surviving: Iterable[int]) -> None:
        """Commit the rows of `path` in order, keep those in `surviving`, drop the rest."""
        ...

    def truncate(self, length: int) -> None:
        """Forget committed tokens behind `length`, and all rows."""
        ...

    @property
    def memory(self) -> int:
        """Bytes of KV; 0 if there is nothing that would be worth keeping."""
        ...

    @property
    def copyable(self) -> bool:
        """Whether another sequence can begin with a copy of what is here."""
        ...

    def again(self, length: int, sampling: Sampling, vocabulary: int, *, free: bool) -> "EngineSequence":
        """A sequence for another request, as `Engine.open` makes it, that has the first `length` committed tokens.

        One that is `free`, because its own request is over, must not be used any more; any other goes on as it is,
        and has to be copyable.
        """
        ...


@runtime_checkable
class ResumableSequence(EngineSequence, Protocol):
    """One whose KV lies in shared memory, where the next life of the worker finds it."""

    @property
    def size(self) -> int:
        """Bytes of shared memory."""
        ...

    def adopt(self, reference: KvReference) -> str:
        """In an empty sequence: go on with the KV that an earlier life left, or say why that can't be."""
        ...

    def save(self) -> KvReference | None:
        """Make what is committed good for adoption; where it is, if that is news."""
        ...

    def close(self) -> None:
        """The sequence is over."""
        ...


class Engine(LoadedModel, Protocol):
    """A loaded draft."""

    def open(self, sampling: Sampling, vocabulary: int) -> EngineSequence:
        """A new, empty sequence whose tokens a target of this vocabulary will sample in this way."""
        ...


@runtime_checkable
class JointEngine(Engine, Protocol):
    """One whose forward can grow the trees of several sequences."""

    def evaluate_together(self, asked: Sequence[tuple[Any, Batch]]) -> list[list[Candidates]]:
        """`EngineSequence.evaluate` of different sequences that this engine has opened, in one forward."""
        ...
