"""A draft of one's own: it guesses that whatever followed the last token before will follow it again.

Use it with `Pipeline(draft_command=(sys.executable, "docs/inside/own_draft.py"))`.
"""

import sys
import time
from collections.abc import Iterable, Sequence
from itertools import pairwise

from draft_worker.engine_interface import Batch, Engine, EngineSequence
from draft_worker.worker import DraftWorker
from protocol.messages.sampling import Sampling
from protocol.speculation.token_tree import Candidates
from protocol.worker.process import WorkerSetup, serve


class EchoEngine(Engine):
    """Works with any tokens; draft_worker/engine_interface.py says what an engine with a model overrides."""

    name = "echo"
    architecture = "pairs of tokens in the text so far"

    def open(self, sampling: Sampling, vocabulary: int) -> "EchoSequence":
        return EchoSequence()


class EchoSequence(EngineSequence):
    """One request: its committed text, and a numbered row for each tree node that was asked about."""

    def __init__(self) -> None:
        self._next_row = 0
        self._text: list[int] = []
        self._rows: dict[int, int] = {}

    @property
    def committed(self) -> int:
        return len(self._text)

    @property
    def next_row(self) -> int:
        return self._next_row

    def prefill(self, tokens: Sequence[int]) -> None:
        self._text += tokens

    def evaluate(self, batch: Batch) -> list[Candidates]:
        self._text += batch.committed
        self._next_row += len(batch.committed)
        self._rows.update(enumerate(batch.tokens, start=self._next_row))
        self._next_row += len(batch.tokens)
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
    sys.exit(serve(setup, lambda: DraftWorker(EchoEngine(), time.perf_counter)))
