"""ReDrafter: a recurrence over the drafted tokens, beside the target's last known state. Knows no messages.

Each row has one state vector, so there is no KV.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import mlx.core as mx

from draft_worker.candidates.columns import Columns
from draft_worker.columns_engine import ColumnsEngine
from draft_worker.drafters.fed_rows import FedRows, safe
from draft_worker.drafters.redrafter_checkpoint import ReDrafterCheckpoint, read_redrafter
from draft_worker.drafters.token_ends import Layer, drafter_ends
from draft_worker.engine import Batch, EngineSequence
from draft_worker.row_tree import RowTree, TokenRow
from protocol.contracts.engines import EngineDeclaration
from protocol.contracts.tokenizer_fingerprint import vocabulary_fingerprint
from protocol.inference.device import BESIDE_TARGET, wire
from protocol.messages.features import FINAL, FeatureForm
from protocol.messages.sampling import Sampling
from protocol.speculation.candidates import Candidates
from protocol.worker.process import WorkerSetup

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ENGINE = EngineDeclaration(help="a ReDrafter head", model="drafter")
_KEPT = 256
"""The features of so many last tokens are kept: a root may move back a little."""
_LONGEST_RUN = 32
"""The recurrence runs over at most so many tokens without features."""


def load(setup: WorkerSetup) -> "ReDrafterEngine":
    """Raises InputError if the folder holds no ReDrafter, or one of another target."""
    engine = ReDrafterEngine.load(Path(setup.model), Path(setup.target) if setup.target else None)
    wire(setup.gpu_share, BESIDE_TARGET)
    return engine


class ReDrafterEngine(ColumnsEngine):
    """A drafter and the embedding of its target."""

    name = architecture = "redrafter"

    def __init__(self, folder: Path, drafter: ReDrafterCheckpoint, embed: Layer, tokens: Path) -> None:
        """`tokens`: the folder of the tokenizer."""
        form = drafter.network.form
        self.model = str(folder)
        self.set_up_columns(tokens, form.vocabulary, drafter.head_tokens)
        self.device = str(mx.default_device())
        self.tokenizer = vocabulary_fingerprint(tokens)
        self.features = FeatureForm((FINAL,), form.width)
        self.network = drafter.network
        self.embed = embed

    @classmethod
    def load(cls, folder: Path, target: Path | None) -> "ReDrafterEngine":
        """`target`: the folder of the target, whose tokenizer is the drafter's too.

        Raises InputError if a folder is damaged, or the two don't fit.
        """
        drafter = read_redrafter(folder)
        form = drafter.network.form
        ends = drafter_ends(folder, None, target, form.width, form.vocabulary, head=False)
        return cls(folder, drafter, ends.embed, folder if target is None else target)

    def open(self, sampling: Sampling, vocabulary: int) -> "ReDrafterSequence":
        return self.around([], FedRows.none(self.network.form.width), sampling, vocabulary)

    def around(self, tokens: list[int], fed: FedRows, sampling: Sampling, vocabulary: int) -> "ReDrafterSequence":
        """A sequence of these committed tokens, the last ones of which have the features `fed`."""
        return ReDrafterSequence(self, tokens, fed, sampling, self.columns(vocabulary))


class _Known(NamedTuple):
    """What the guess behind a token is made of, (width,) each."""

    feature: mx.array
    """The target's state of the last token that had one when the path began."""
    state: mx.array
    """Behind the tokens since that one."""


class _StateRow(TokenRow):
    """A row of the tree, and what is known behind it once it is computed."""

    def __init__(self, token: int, parent: int, position: int) -> None:
        """`position`: index of the token."""
        super().__init__(token, parent)
        self.position = position
        self.known: _Known | None = None


class ReDrafterSequence(EngineSequence):
    """The committed tokens, the features of the last ones, and the states of the tree's rows."""

    copyable = True

    def __init__(
        self, engine: ReDrafterEngine, tokens: list[int], fed: FedRows, sampling: Sampling, columns: Columns
    ) -> None:
        self._engine = engine
        self._tokens = tokens
        self._fed = fed
        self._sampling = sampling
        self._columns = columns
        self._tree = RowTree[_StateRow]()

    @property
    def committed(self) -> int:
        return len(self._tokens)

    @property
    def next_row(self) -> int:
        return self._tree.next_row

    def prefill(self, tokens: Sequence[int]) -> None:
        self._tokens += tokens

    def feed(self, first: int, rows: "NDArray[np.float32]") -> None:
        self._fed = self._fed.extended(first, safe(rows), _KEPT)

    @property
    def staleness(self) -> int:
        return self.committed - self._fed.end

    def evaluate(self, batch: Batch) -> list[Candidates]:
        self.prefill(batch.committed)
        self._tree.skip(len(batch.committed))
        rows = [self._placed(token, parent) for token, parent in zip(batch.tokens, batch.parents, strict=True)]
        self._run(rows)
        known = [row.known for row in rows if row.known is not None]
        features, states = mx.stack([each.feature for each in known]), mx.stack([each.state for each in known])
        mx.eval(known)
        logits = mx.nan_to_num(self._engine.network.logits(features, states), nan=0.0)
        positions = [row.position + 1 + batch.skipped for row in rows]
        return self._columns.propose(logits, positions, self._sampling, batch)

    def keep(self, path: Sequence[int], surviving: Iterable[int]) -> None:
        self._tokens += [row.token for row in self._tree.keep(path, surviving)]

    def truncate(self, length: int) -> None:
        del self._tokens[length:]
        self._tree.clear()
        self._fed = self._fed.before(length)

    @property
    def memory(self) -> int:
        return self._fed.rows.nbytes

    def reopen(self, length: int, sampling: Sampling, vocabulary: int, *, exclusive: bool) -> "ReDrafterSequence":
        return self._engine.around(self._tokens[:length], self._fed.before(length), sampling, vocabulary)

    def _placed(self, token: int, parent: int) -> _StateRow:
        """The next row."""
        above = self._tree.get(parent)
        row = _StateRow(token, parent, self.committed if above is None else above.position + 1)
        self._tree.add(row)
        return row

    def _run(self, rows: Sequence[_StateRow]) -> None:
        """What new rows know: parents before their children, and all that are ready at once."""
        behind = {row: self._tree.get(row.parent) for row in rows}
        roots = [row for row, above in behind.items() if above is None]
        if roots:
            known = self._behind_committed()
            self._step([(row, known) for row in roots])
        while waiting := [(row, above) for row, above in behind.items() if row.known is None]:
            self._step([(row, above.known) for row, above in waiting if above and above.known])

    def _step(self, rows: Sequence[tuple[_StateRow, _Known]]) -> None:
        """Take each row's token after what is known before it."""
        embedded = self._engine.embed(mx.array([row.token for row, _ in rows]))
        states = self._engine.network.step(mx.stack([before.state for _, before in rows]), embedded)
        for (row, before), state in zip(rows, states, strict=True):
            row.known = _Known(before.feature, state)

    def _behind_committed(self) -> _Known:
        """The last feature, and the state behind the committed tokens that follow it."""
        network, width = self._engine.network, self._engine.network.form.width
        element = network.lm_head[-1].weight.dtype
        fed = len(self._fed.rows) > 0
        feature = mx.array(self._fed.rows[-1]).astype(element) if fed else mx.zeros((width,), element)
        state = mx.zeros((width,), element)
        for token in self._tokens[self._fed.end :][-_LONGEST_RUN:]:
            state = network.step(state, self._engine.embed(mx.array(token)))
        return _Known(feature, state)
