"""A draft process that reads features: `python -m tests.support.feature_draft LOG TARGET SETUP`.

It guesses that what followed a token before will follow it again. Of every feature that it is fed it writes down a line
to LOG: the token's index, and the token that the target's head makes of the feature, which is the target's next one.
"""

import sys
import time
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from draft_worker.engine import Batch, Engine, EngineSequence
from draft_worker.worker import DraftWorker
from protocol.messages.features import FINAL, FeatureForm
from protocol.messages.sampling import Sampling
from protocol.speculation.candidates import Candidates
from protocol.worker.process import WorkerSetup, serve

WIDTH = 256
_HEAD = "model.embed_tokens.weight"


class FeatureEngine(Engine):
    name, architecture = "features", "pairs of tokens in the text so far"
    features = FeatureForm((FINAL, 1, 3), WIDTH)

    def __init__(self, log: Path, target: Path) -> None:
        weights = mx.load(str(target / "model.safetensors"))
        assert isinstance(weights, dict)
        self.head = weights[_HEAD].astype(mx.float32)
        self.log = log

    def open(self, sampling: Sampling, vocabulary: int) -> "FeatureSequence":
        return FeatureSequence(self)


class FeatureSequence(EngineSequence):
    def __init__(self, engine: FeatureEngine) -> None:
        self._engine = engine
        self._next_row = 0
        self._text: list[int] = []
        self._rows: dict[int, int] = {}
        self._fed = 0

    @property
    def committed(self) -> int:
        return len(self._text)

    @property
    def next_row(self) -> int:
        return self._next_row

    @property
    def staleness(self) -> int:
        return len(self._text) - self._fed

    def prefill(self, tokens: Sequence[int]) -> None:
        self._text += tokens

    def feed(self, first: int, rows: NDArray[np.float32]) -> None:
        assert self._fed <= first < first + len(rows) <= len(self._text)
        self._fed = first + len(rows)
        predicted = mx.argmax(mx.array(rows[:, :WIDTH]) @ self._engine.head.T, axis=-1).tolist()
        assert isinstance(predicted, list)
        with self._engine.log.open("a") as log:
            log.writelines(f"{index} {token}\n" for index, token in enumerate(predicted, start=first))

    def evaluate(self, batch: Batch) -> list[Candidates]:
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
        self._fed = min(self._fed, length)
        self._rows = {}


def main() -> int:
    setup, log, target = WorkerSetup.from_arguments(), Path(sys.argv[1]), Path(sys.argv[2])
    return serve(setup, lambda: DraftWorker(FeatureEngine(log, target), time.perf_counter))


if __name__ == "__main__":
    sys.exit(main())
