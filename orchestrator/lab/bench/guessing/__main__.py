"""The process: an AcceptanceOrder as its argument, reports as lines of JSON on standard output."""

import importlib
import signal
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import TextIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from draft_worker.engine import Engine
from draft_worker.training.corpus.states import states_of, tap_of
from draft_worker.training.target import Target
from orchestrator.lab.bench.guessing.guesses import hits, rates, seconds_per_guess
from orchestrator.lab.bench.guessing.messages import (
    AcceptanceFinished,
    AcceptanceOrder,
    AcceptanceProgress,
    AcceptanceReport,
    DraftAcceptance,
    ExaminedDraft,
    TargetText,
)
from protocol.contracts.coreml.conversion import Failed
from protocol.contracts.training import STALENESS, Acceptance
from protocol.errors import InputError, PipelineError
from protocol.messages.features import FeatureForm
from protocol.worker.process import WorkerSetup


class Process:
    """Examines one draft after another."""

    def __init__(self, order: AcceptanceOrder, output: TextIO) -> None:
        self._order, self._output = order, output
        self._target = Target(Path(order.target))
        self._texts = msgspec.json.decode(Path(order.texts).read_bytes(), type=list[TargetText])
        self._done = 0

    def run(self) -> None:
        for draft in self._order.drafts:
            _write(self._output, self._examined(draft))
        _write(self._output, AcceptanceFinished())

    def _examined(self, draft: ExaminedDraft) -> DraftAcceptance:
        engine = self._engine(draft)
        found: dict[float, list[list[list[bool]]]] = defaultdict(lambda: [[] for _ in self._stale(engine)])
        seconds: list[float] = []
        for text, features in zip(self._texts, self._features(engine), strict=True):
            for stale in self._stale(engine):
                found[text.temperature][stale] += hits(engine, text, features, stale, self._target.vocabulary)
            seconds += seconds_per_guess(engine, text, features, self._target.vocabulary)
            self._done += 1
            total = len(self._texts) * len(self._order.drafts)
            _write(self._output, AcceptanceProgress(name=draft.name, done=self._done, total=total))
        acceptance = tuple(
            Acceptance(temperature, len(chains[0]), tuple(map(rates, chains)))
            for temperature, chains in sorted(found.items())
        )
        return DraftAcceptance(name=draft.name, acceptance=acceptance, seconds_per_guess=median(seconds or [0.0]))

    def _engine(self, draft: ExaminedDraft) -> Engine:
        setup = WorkerSetup(
            address="", epoch=1, incarnation=1, engine=draft.engine, model=draft.model, target=self._order.target
        )
        return importlib.import_module(f"draft_worker.engines.{draft.engine}").load(setup)

    def _stale(self, engine: Engine) -> range:
        """Tokens without features that are examined; a draft without features is never stale."""
        return range(1 if engine.features is None else STALENESS)

    def _features(self, engine: Engine) -> Iterator[NDArray[np.float32] | None]:
        """Of each text, what the engine reads of the target."""
        if engine.features is None:
            yield from (None for _ in self._texts)
        else:
            yield from self._recorded(engine.features, self._texts)

    def _recorded(self, form: FeatureForm, texts: Sequence[TargetText]) -> Iterator[NDArray[np.float32]]:
        tap, order = tap_of(self._target.model, self._order.target), sorted(form.outputs)
        places = [order.index(output) for output in form.outputs]
        tap.record(tuple(order))
        try:
            for text in texts:
                states = states_of(self._target.model, tap, np.array(text.tokens))
                states = states.reshape(len(text.tokens), len(order), -1)[:, places]
                yield states.reshape(len(text.tokens), -1).astype(np.float32)
        finally:
            tap.record(())


def main() -> int:
    # The parent handles Ctrl-C and sends SIGTERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Libraries may print to standard output, which is for reports alone.
    output, sys.stdout = sys.stdout, sys.stderr
    try:
        Process(msgspec.json.decode(sys.argv[1], type=AcceptanceOrder), output).run()
    except PipelineError as error:
        _write(output, Failed(str(error), isinstance(error, InputError)))
        return 1
    except OSError as error:
        _write(output, Failed(f"The drafts could not be examined ({error}): start the bench again.", input_error=False))
        return 1
    return 0


def _write(output: TextIO, report: AcceptanceReport) -> None:
    output.write(msgspec.json.encode(report).decode() + "\n")
    output.flush()


if __name__ == "__main__":
    sys.exit(main())
