"""The draft on MLX: token trees through a stock mlx-lm model. Knows no messages and no growth plans."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self

import mlx.core as mx

from draft_worker.candidates.head_columns import Columns, ColumnsEngine, ContextColumns, widened
from draft_worker.candidates.host_ranking import CandidateSelector
from draft_worker.engine_interface import Batch, EngineSequence
from draft_worker.short_head import HeadTokens, ShortHead, read_head_tokens, shorten_head
from protocol.contracts.engines import EngineDeclaration
from protocol.contracts.tokenizer_fingerprint import vocabulary_fingerprint
from protocol.inference.forward_costs import costs_at_load
from protocol.inference.joint_forward import ForwardPart
from protocol.inference.language_model import LanguageModel
from protocol.inference.path_sequence import PathSequence
from protocol.inference.tree_sequence import TreeSequence
from protocol.messages.sampling import Sampling
from protocol.sampling.top_tokens import on_host
from protocol.speculation.token_tree import Candidates
from protocol.worker.process import WorkerSetup

ENGINE = EngineDeclaration(help="a model in mlx-lm's format", model="checkpoint")


def load(setup: WorkerSetup) -> "MlxEngine":
    """Raises InputError if the folder holds no model that can serve."""
    return MlxEngine.load(Path(setup.model))


class MlxEngine(ColumnsEngine):
    """Any model that `LanguageModel` can load."""

    name = "mlx"
    joint = True

    def __init__(self, model: LanguageModel, tokenizer: str, head: HeadTokens | None = None) -> None:
        """`tokenizer`: the fingerprint of the model's tokenizer. `head`: the only tokens that the engine drafts."""
        self._short: ShortHead | None = None if head is None else shorten_head(model.network, head)
        self.model = str(model.folder)
        self.architecture = model.architecture
        self.set_up_columns(model.folder, model.vocabulary, head)
        self.context = model.context
        self.device = str(mx.default_device())
        self.tokenizer = tokenizer
        self._network = model

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Raises InputError if the folder holds no model that can serve."""
        model = LanguageModel.load(folder)
        return cls(model, vocabulary_fingerprint(folder), read_head_tokens(folder, model.vocabulary))

    def measured(self, loading: float, identity: str) -> tuple[tuple[int, float], ...]:
        return costs_at_load(self._network, loading, identity).by_width

    def open(self, sampling: Sampling, vocabulary: int) -> "MlxSequence":
        rows = self._network.sequence()
        return self.around(rows if rows.level == "tree" else PathSequence(rows), sampling, vocabulary)

    def around(self, rows: TreeSequence | PathSequence, sampling: Sampling, vocabulary: int) -> "MlxSequence":
        """A sequence that has the KV of `rows`."""
        return MlxSequence(self, rows, sampling, self.columns(vocabulary))

    def evaluate_together(self, parts: Sequence[tuple["MlxSequence", Batch]]) -> list[list[Candidates]]:
        forward = [sequence.part(batch) for sequence, batch in parts]
        more = widened(self._short, [sequence.columns for sequence, _ in parts])
        logits = self._network.evaluate_together(forward)
        return [
            sequence.candidates(sequence.columns.own(rows, more), batch)
            for rows, (sequence, batch) in zip(logits, parts, strict=True)
        ]

    @property
    def widens(self) -> bool:
        """Whether tokens of a context that the head lacks can be guessed."""
        return self._short is not None and self._short.widens


class MlxSequence(EngineSequence):
    """The KV of one sequence, and the sampling of its request."""

    copyable = True

    def __init__(
        self, engine: MlxEngine, rows: TreeSequence | PathSequence, sampling: Sampling, columns: Columns
    ) -> None:
        self._engine = engine
        self._rows = rows
        self.step_nodes = None if isinstance(rows, TreeSequence) else 1
        self._sampling = sampling
        self.columns = ContextColumns(columns, widens=engine.widens)
        self._selector: CandidateSelector | None = None

    @property
    def committed(self) -> int:
        return self._rows.committed

    @property
    def next_row(self) -> int:
        return self._rows.next_row

    def prefill(self, tokens: Sequence[int]) -> None:
        self.columns.see(tokens)
        self._rows.prefill(tokens)
        self._rows.forget(self._rows.committed)

    def evaluate(self, batch: Batch) -> list[Candidates]:
        return self._engine.evaluate_together([(self, batch)])[0]

    def part(self, batch: Batch) -> ForwardPart:
        """This sequence's part of a joint forward."""
        self.columns.see([*batch.committed, *batch.tokens])
        behind, begin = len(batch.committed), self._rows.next_row
        tip = begin + behind - 1 if behind else -1
        parents = [tip if parent == -1 else parent for parent in batch.parents]
        chain = [-1, *range(begin, begin + behind - 1)][:behind]
        return ForwardPart(self._rows, [*batch.committed, *batch.tokens], chain + parents)

    def candidates(self, logits: mx.array, batch: Batch) -> list[Candidates]:
        """Candidates from the (L, columns) `logits` of `part(batch)`. Commits the rows of `batch.committed`."""
        behind = len(batch.committed)
        nodes = range(self._rows.next_row - len(batch.tokens), self._rows.next_row)
        positions = [self._rows.position(row) + 1 + batch.skipped for row in nodes]
        if behind:
            self._rows.keep(range(nodes.start - behind, nodes.start), nodes)
        return self._select(logits, behind, positions, batch)

    def _select(self, logits: mx.array, first: int, positions: Sequence[int], batch: Batch) -> list[Candidates]:
        """Of the rows from `first` on. On a processor numpy takes less time for them than MLX."""
        columns = self.columns.now
        if not on_host():
            return columns.propose(logits[first:], positions, self._sampling, batch)
        if self._selector is None or self._selector.columns is not columns:
            self._selector = CandidateSelector(columns)
        return self._selector.select_of(logits, first, positions, self._sampling, batch)

    def keep(self, path: Sequence[int], surviving: Iterable[int]) -> None:
        self._rows.keep(path, surviving)
        self._rows.forget(self._rows.committed)

    def truncate(self, length: int) -> None:
        self._rows.truncate(length)

    def reach(self, tokens: int) -> int:
        return self._rows.reach(tokens)

    @property
    def memory(self) -> int:
        return self._rows.memory

    def shed(self) -> bool:
        return self._rows.shed()

    def shorten(self, tokens: int) -> None:
        self._rows.shorten(tokens)

    def reopen(self, length: int, sampling: Sampling, vocabulary: int, *, exclusive: bool) -> "MlxSequence":
        rows = self._rows if exclusive else self._rows.copy(length)
        rows.truncate(length)
        opened = self._engine.around(rows, sampling, vocabulary)
        opened.columns.see(self.columns.tokens)
        return opened
