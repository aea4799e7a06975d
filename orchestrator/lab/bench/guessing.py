"""The process: an AcceptanceOrder as its argument, reports as lines of JSON on standard output."""

import importlib
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, TextIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from draft_worker.engine import Batch, Engine, EngineSequence
from draft_worker.training.corpus.states import states_of, tap_of
from draft_worker.training.target import Target
from orchestrator.lab.bench.acceptance import (
    AcceptanceFinished,
    AcceptanceOrder,
    AcceptanceProgress,
    AcceptanceReport,
    DraftAcceptance,
    ExaminedDraft,
    TargetText,
)
from protocol.contracts.coreml.conversion import Failed
from protocol.contracts.training import DEPTHS, STALENESS, HeldOutAcceptance
from protocol.errors import InputError, PipelineError
from protocol.messages.features import FeatureForm
from protocol.messages.sampling import Sampling
from protocol.worker.process import WorkerSetup

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

STRIDE = 4
"""Every fourth token of an answer is a root."""
_TIMED = 8
"""Chains of guesses whose time is taken, in one text."""
_READ = 64


def hits(
    engine: Engine, text: TargetText, features: "NDArray[np.float32] | None", stale: int, vocabulary: int
) -> Iterator[list[bool]]:
    """For each root, whether each guess of a chain along the text is right: DEPTHS, or as many as the text has tokens.

    The features, (tokens, outputs * width), of the `stale` tokens before the root are not known yet; None for an engine
    that reads none. Guesses have the text's noise.
    """
    walk = _Walk(engine, text, features, stale, vocabulary)
    for root in range(text.prompt - 1, len(text.tokens) - 1, STRIDE):
        path, wanted = text.tokens[root : root + DEPTHS], text.tokens[root + 1 : root + 1 + DEPTHS]
        first = walk.advance(root)
        found = walk.sequence.evaluate(Batch((), path, [-1, *range(first, first + len(path) - 1)], 1))
        walk.sequence.keep([first], [])
        yield [list(each.tokens[:1]) == [token] for each, token in zip(found, wanted, strict=False)]
    walk.sequence.close()


def seconds_per_guess(
    engine: Engine,
    text: TargetText,
    features: "NDArray[np.float32] | None",
    vocabulary: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Of some chains of DEPTHS guesses: their time by guess, where each guess is one growth step."""
    walk = _Walk(engine, text, features, 0, vocabulary)
    taken = []
    for root in range(text.prompt - 1, len(text.tokens) - DEPTHS, STRIDE)[:_TIMED]:
        first = walk.advance(root)
        began, parent = clock(), -1
        for row, token in enumerate(text.tokens[root : root + DEPTHS], first):
            walk.sequence.evaluate(Batch((), [token], [parent], 1))
            parent = row
        taken.append((clock() - began) / DEPTHS)
        walk.sequence.keep([first], [])
    walk.sequence.close()
    return taken


def rates(chains: list[list[bool]]) -> tuple[float | None, ...]:
    """By depth: the share of right guesses where all guesses in front were right; None without such a place."""
    found: list[float | None] = []
    for depth in range(DEPTHS):
        alive = [chain[depth] for chain in chains if len(chain) > depth and all(chain[:depth])]
        found.append(sum(alive) / len(alive) if alive else None)
    return tuple(found)


class _Walk:
    """A sequence whose root moves along the text, with features as late as they are said to be."""

    sequence: EngineSequence

    def __init__(
        self, engine: Engine, text: TargetText, features: "NDArray[np.float32] | None", stale: int, vocabulary: int
    ) -> None:
        self.sequence = engine.open(Sampling(temperature=text.temperature, seed=text.seed), vocabulary)
        self._tokens = text.tokens
        self._features = features
        self._stale = stale
        self._fed = 0
        self._committed = 0

    def advance(self, root: int) -> int:
        """Commit the tokens before the root, and feed what is known of them. Returns the row of the root's node."""
        if missing := self._tokens[self._committed : root]:
            self.sequence.prefill(missing)
        self._feed(root - self._stale)
        # The root's own row will be kept.
        self._committed = root + 1
        return self.sequence.next_row

    def _feed(self, end: int) -> None:
        if self._features is not None and end > self._fed:
            self.sequence.feed(self._fed, self._features[self._fed : end])
            self._fed = end
            while self.sequence.unread:
                self.sequence.read(_READ)


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
            HeldOutAcceptance(temperature, len(chains[0]), tuple(map(rates, chains)))
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
