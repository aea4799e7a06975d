"""What a draft engine is: base classes whose defaults are those of an engine without a model. Knows no plans.

Each module of draft_worker.engines holds one engine and declares it (`EngineDeclaration`). No engine knows messages.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from protocol.messages.base import MAX_CONTEXT, Role
from protocol.messages.sampling import Sampling
from protocol.messages.worker import Hello, KvReference
from protocol.speculation.candidates import Candidates

if TYPE_CHECKING:
    # Imports MLX, which not every engine needs.
    from protocol.sampling.logits_processors import LogitsProcessors

ANY_TOKEN = 1 << 20
"""The vocabulary of an engine that works with any tokens."""


class LoadedModel(Protocol):
    """What drafting and prefill engines say of their models."""

    name: str
    model: str
    """Folder; empty without a model."""
    architecture: str
    vocabulary: int
    """Bounds the tokens that the engine knows."""
    context: int
    """Bounds the positions."""
    device: str
    tokenizer: str
    """Fingerprint of the model's tokenizer; empty for an engine that works with any tokens."""


def introduction(role: Role, engine: LoadedModel) -> Hello:
    """The Hello of a worker in this process that runs `engine`."""
    return Hello(
        role=role,
        engine=engine.name,
        model=engine.model,
        architecture=engine.architecture,
        vocabulary=engine.vocabulary,
        context=engine.context,
        tokenizer_fingerprint=engine.tokenizer,
        device=engine.device,
        pid=os.getpid(),
    )


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


class EngineSequence(ABC):
    """One sequence's KV: a committed prefix, then rows of tree nodes whose numbers stay valid until dropped."""

    path_tokens: int = 0
    """How many tokens of a node's path the engine wants to see."""
    copyable: bool = False
    """Whether `reopen` can leave this sequence to its request and copy its KV."""

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
        """One forward; what may follow each node."""

    @abstractmethod
    def keep(self, path: Sequence[int], surviving: Iterable[int]) -> None:
        """Commit the rows of `path` in order, keep those in `surviving`, drop the rest."""

    @abstractmethod
    def truncate(self, length: int) -> None:
        """Forget committed tokens behind `length`, and all rows."""

    @property
    def memory(self) -> int:
        """Bytes of KV; 0 if there is nothing that would be worth keeping."""
        return 0

    def reopen(self, length: int, sampling: Sampling, vocabulary: int, *, exclusive: bool) -> "EngineSequence":
        """A sequence for another request, as `Engine.open` makes it, that has the first `length` committed tokens.

        `exclusive`: this sequence's own request is over, and only the result may be used from now on. Otherwise this
        sequence stays as it is, and must be `copyable`. The default fits a sequence that does not depend on the
        sampling.
        """
        assert exclusive, "a sequence that is not copyable serves one request at a time"
        self.truncate(length)
        return self

    @property
    def size(self) -> int:
        """Bytes of shared memory that hold the KV; 0 if the KV ends with this process."""
        return 0

    def adopt(self, reference: KvReference) -> str:
        """In an empty sequence: go on with the KV that an earlier life left, or say why that can't be."""
        return "This draft shares no KV: prefill again."

    def save(self) -> KvReference | None:
        """Make the committed KV good for adoption; where it is, if that is news."""
        return None

    def close(self) -> None:
        """The sequence is over."""
        return


class Engine(LoadedModel, ABC):
    """A loaded draft. A subclass names itself and its architecture."""

    model: str = ""
    vocabulary: int = ANY_TOKEN
    context: int = MAX_CONTEXT
    device: str = "cpu"
    tokenizer: str = ""
    joint: bool = False
    """Whether one forward can grow the trees of several sequences."""

    @abstractmethod
    def open(self, sampling: Sampling, vocabulary: int) -> EngineSequence:
        """A new, empty sequence whose tokens a target of this vocabulary will sample in this way."""

    def evaluate_together(self, asked: Sequence[tuple[Any, Batch]]) -> list[list[Candidates]]:
        """`EngineSequence.evaluate` of different sequences that this engine has opened; in one forward if `joint`."""
        return [sequence.evaluate(batch) for sequence, batch in asked]
