"""A draft of one's own: it guesses that whatever followed the last token before will follow it again.

Use it with `Pipeline(draft_command=(sys.executable, "docs/own_draft.py"))`.
"""

import sys
import time
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

from draft_worker.engine import Batch
from draft_worker.worker import DraftWorker
from protocol.contracts.tokenizer_fingerprint import tokenizer_fingerprint
from protocol.messages.sampling import Sampling
from protocol.speculation.candidates import Candidates
from protocol.worker.process import WorkerSetup, serve


class EchoEngine:
    """Whatever has these attributes and `open` can draft; see draft_worker/engine.py."""

    name = "echo"
    architecture = "pairs of tokens in the text so far"
    device = "cpu"
    vocabulary = context = 1 << 20

    def __init__(self, folder: str) -> None:
        self.model = folder
        self.tokenizer = tokenizer_fingerprint(Path(folder))

    def open(self, sampling: Sampling, vocabulary: int) -> "EchoSequence":
        return EchoSequence()


class EchoSequence:
    """One request: its committed text, and a numbered row for each tree node that was asked about."""

    path_tokens = 0

    def __init__(self) -> None:
        self.next_row = 0
        self._text: list[int] = []
        self._rows: dict[int, int] = {}

    @property
    def committed(self) -> int:
        return len(self._text)

    def prefill(self, tokens: Sequence[int]) -> None:
        self._text += tokens

    def evaluate(self, batch: Batch) -> list[Candidates]:
        self._text += batch.committed
        self.next_row += len(batch.committed)
        self._rows.update(enumerate(batch.tokens, start=self.next_row))
        self.next_row += len(batch.tokens)
        follower = dict(pairwise(self._text))
        return [
            Candidates([follower[token]], [0.5]) if token in follower else Candidates([], []) for token in batch.tokens
        ]

    def keep(self, path: Sequence[int], surviving: Iterable[int]) -> None:
        self._text += [self._rows[row] for row in path]
        self._rows = {row: self._rows[row] for row in surviving}

    def truncate(self, length: int) -> None:
        del self._text[length:]
        self._rows = {}


if __name__ == "__main__":
    setup = WorkerSetup.from_arguments()
    sys.exit(serve(setup, lambda: DraftWorker(EchoEngine(setup.model), time.perf_counter)))
