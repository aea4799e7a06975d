"""What every engine with logits shares: the columns of its head, and the grammars of its tokenizer."""

from pathlib import Path

from draft_worker.candidates.columns import Columns
from draft_worker.engine import Engine
from draft_worker.head_tokens import HeadTokens
from protocol.sampling.grammar import Grammars


class ColumnsEngine(Engine):
    """A subclass calls `set_up_columns` while it is made."""

    def set_up_columns(self, folder: Path, vocabulary: int, head: HeadTokens | None) -> None:
        """`folder` holds the tokenizer. `head`: the tokens of the draft's head if it has only some."""
        self.vocabulary = vocabulary
        self._head = head
        self.grammars = Grammars(folder, vocabulary)
        self._columns: dict[int, Columns] = {}
        """By the size of the target's vocabulary."""

    def columns(self, vocabulary: int) -> Columns:
        """Beside a target of so many tokens."""
        if vocabulary not in self._columns:
            self._columns[vocabulary] = Columns(vocabulary, min(self.vocabulary, vocabulary), self._head)
        return self._columns[vocabulary]
