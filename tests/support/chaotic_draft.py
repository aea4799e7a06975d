"""A faulty draft process: `python -m tests.support.chaotic_draft MODE SETUP`. Knows no target.

The modes of the drills, and an honest draft whose messages lose their order (`Disorder`).
"""

import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from draft_worker.engines.mlx import MlxEngine
from draft_worker.worker import DraftWorker
from orchestrator.lab.drill import faulty_draft
from protocol.messages.worker import Hello, ToWorker
from protocol.worker.interface import Worker, WorkerReply
from protocol.worker.process import WorkerSetup, serve


class Disorder:
    """An honest draft whose messages are delayed, doubled and sent in another order."""

    def __init__(self, setup: WorkerSetup) -> None:
        self._draft = DraftWorker(MlxEngine.load(Path(setup.model)), time.perf_counter)
        self._source = random.Random(2)
        self._held: list[WorkerReply] = []

    def hello(self) -> Hello:
        return self._draft.hello()

    def handle(self, message: ToWorker) -> Iterator[WorkerReply]:
        self._held += self._draft.handle(message)
        yield from ()

    @property
    def has_work(self) -> bool:
        return self._draft.has_work or bool(self._held)

    def work(self) -> Iterator[WorkerReply]:
        self._held += self._draft.work()
        self._source.shuffle(self._held)
        for message in self._held[: self._source.randrange(len(self._held) + 1)]:
            yield message
            if self._source.random() < 0.5:
                self._held.remove(message)


MODES: dict[str, Callable[[WorkerSetup], Worker]] = {**faulty_draft.MODES, "disorder": Disorder}


def main() -> int:
    setup = WorkerSetup.from_arguments()
    return serve(setup, lambda: MODES[sys.argv[1]](setup))


if __name__ == "__main__":
    sys.exit(main())
