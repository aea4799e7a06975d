"""A draft without a model: guesses the tokens that followed earlier occurrences of the last tokens.

Imports MLX only for a grammar.
"""

from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from draft_worker.engine_interface import ANY_TOKEN, Batch, Engine, EngineSequence, RowTree, TokenRow
from protocol.contracts.engines import EngineDeclaration
from protocol.contracts.model_folder import ModelFolder
from protocol.contracts.tokenizer_fingerprint import vocabulary_fingerprint
from protocol.errors import InputError
from protocol.messages.sampling import Sampling
from protocol.messages.worker import Start
from protocol.sampling.grammar import Grammars
from protocol.speculation.prompt_lookup import LONGEST, PromptLookup
from protocol.speculation.token_tree import Candidates
from protocol.worker.process import WorkerSetup

if TYPE_CHECKING:
    from protocol.sampling.logits_processors import LogitsProcessors

ENGINE = EngineDeclaration(help="prompt lookup, which needs no model", model="none")


def load(setup: WorkerSetup) -> "NgramEngine":
    """Raises InputError if a folder is given and holds no model."""
    return NgramEngine(Path(setup.model) if setup.model else None)


class NgramEngine(Engine):
    """Prompt lookup (Saxena 2023) in the committed tokens of each sequence."""

    name = "ngram"
    architecture = "prompt lookup"

    def __init__(self, folder: Path | None = None) -> None:
        """`folder`: a model whose tokens are drafted. Without it, the engine drafts any tokens.

        Raises InputError if the folder's config.json or tokenizer.json is missing or broken.
        """
        if folder is not None:
            self.model = str(folder)
            self.vocabulary = _vocabulary(folder)
            self.tokenizer = vocabulary_fingerprint(folder)
            self.grammars = Grammars(folder, self.vocabulary)

    def open(self, sampling: Sampling, vocabulary: int) -> "NgramSequence":
        return NgramSequence()

    def processors(self, start: Start) -> "LogitsProcessors | None":
        """Only a grammar matters to an engine without logits: it forces tokens."""
        return None if start.sampling.grammar is None else super().processors(start)


class NgramSequence(EngineSequence):
    """The committed tokens in an index, and the rows of the tree."""

    def __init__(self) -> None:
        self._lookup = PromptLookup()
        self._tree = RowTree[TokenRow]()

    @property
    def committed(self) -> int:
        return len(self._lookup)

    @property
    def next_row(self) -> int:
        return self._tree.next_row

    def prefill(self, tokens: Sequence[int]) -> None:
        self._lookup.extend(tokens)

    def evaluate(self, batch: Batch) -> list[Candidates]:
        self._lookup.extend(batch.committed)
        self._tree.skip(len(batch.committed))
        begin = self.next_row
        for token, parent in zip(batch.tokens, batch.parents, strict=True):
            self._tree.add(TokenRow(token, parent))
        return [self._candidates(row, batch.limit) for row in range(begin, self.next_row)]

    def keep(self, path: Sequence[int], surviving: Iterable[int]) -> None:
        self._lookup.extend([row.token for row in self._tree.keep(path, surviving)])

    def truncate(self, length: int) -> None:
        self._lookup.truncate(length)
        self._tree.clear()

    def _candidates(self, row: int, limit: int) -> Candidates:
        found = self._lookup.continuations(self._suffix(row), limit)
        return Candidates([token for token, _ in found], [probability for _, probability in found])

    def _suffix(self, row: int) -> list[int]:
        """The last tokens up to and with the node in `row`, at most `LONGEST`."""
        reverse = [each.token for each in islice(self._tree.path(row), LONGEST)]
        return [*self._lookup.last(LONGEST - len(reverse)), *reversed(reverse)]


def _vocabulary(folder: Path) -> int:
    size = ModelFolder(folder).vocabulary
    if size is None or size > ANY_TOKEN:
        raise InputError(f"{folder}/config.json states no vocab_size: pass the folder of a complete model.")
    return size
