"""The draft as a Core ML package of another's making, whose KV is a state: one path at a time.

The cache holds one path, since a row's slot is its position. Another path costs an evaluation of the tokens in which
it differs. So a growth step has one node, and a tree grows path by path.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from draft_worker.candidates.selector import CandidateSelector
from draft_worker.coreml.stateful.forward import StatefulForward
from draft_worker.coreml.stateful.package import StatefulPackage
from draft_worker.coreml.stateful.runtimes import StatefulRuntime, open_stateful
from draft_worker.engine import Batch, Engine, EngineSequence
from protocol.contracts.engines import EngineDeclaration
from protocol.contracts.tokenizer_fingerprint import vocabulary_fingerprint
from protocol.inference.device.processor import compute_on_processor
from protocol.messages.sampling import Sampling
from protocol.messages.worker import Start
from protocol.sampling.grammar import Grammars
from protocol.sampling.processors.logits_processors import LogitsProcessors
from protocol.speculation.candidates import Candidates
from protocol.worker.process import WorkerSetup

# Selected by the draft's name, which ends in .mlpackage.
ENGINE = EngineDeclaration(help="a Core ML package with its KV as states", model="stateful", hidden=True)


def load(setup: WorkerSetup) -> "StatefulEngine":
    """Raises InputError, which says what does not fit, for a package that can't draft."""
    # The GPU is the target's; the host computes little beside a call.
    compute_on_processor()
    package = StatefulPackage.open(Path(setup.model))
    return StatefulEngine(package, open_stateful(package))


class StatefulEngine(Engine):
    name = "stateful"

    def __init__(self, package: StatefulPackage, runtime: StatefulRuntime) -> None:
        layout = package.layout
        self.model = str(package.path)
        self.architecture = layout.source or "Core ML with states"
        self.vocabulary = layout.vocabulary
        self.context = layout.context
        self.device = runtime.device
        self.tokenizer = vocabulary_fingerprint(package.tokenizer)
        self.state_bytes = layout.state_bytes
        self.forward = StatefulForward(layout, runtime)
        self._selectors: dict[int, CandidateSelector] = {}
        """By the size of the target's vocabulary."""
        self._grammars = Grammars(package.tokenizer, self.vocabulary)

    def open(self, sampling: Sampling, vocabulary: int) -> "StatefulSequence":
        return StatefulSequence(self, sampling, vocabulary)

    def processors(self, start: Start) -> LogitsProcessors | None:
        return LogitsProcessors.wanted(start, self._grammars, lenient=True)

    def selector(self, vocabulary: int) -> CandidateSelector:
        if vocabulary not in self._selectors:
            self._selectors[vocabulary] = CandidateSelector(vocabulary, min(self.vocabulary, vocabulary))
        return self._selectors[vocabulary]


class StatefulSequence(EngineSequence):
    """The committed tokens, each row's token and parent, and a cache that holds the path of the last call."""

    step_nodes = 1

    def __init__(self, engine: StatefulEngine, sampling: Sampling, vocabulary: int) -> None:
        self._engine = engine
        self._cache = engine.forward.cache()
        self._committed: list[int] = []
        self._rows: dict[int, tuple[int, int]] = {}
        """Token and parent of each row. A parent that is no key is the end of the committed prefix."""
        self._next_row = 0
        self._serve(sampling, vocabulary)

    @property
    def committed(self) -> int:
        return len(self._committed)

    @property
    def next_row(self) -> int:
        return self._next_row

    def prefill(self, tokens: Sequence[int]) -> None:
        self._committed += tokens
        self._engine.forward.run(self._cache, self._committed, wanted=0)

    def evaluate(self, batch: Batch) -> list[Candidates]:
        self._committed += batch.committed
        begin = self._next_row + len(batch.committed)
        self._rows.update(enumerate(zip(batch.tokens, batch.parents, strict=True), start=begin))
        self._next_row = begin + len(batch.tokens)
        found: dict[int, Candidates] = {}
        # A call for a node evaluates the ancestors that the batch holds too.
        for row in range(self._next_row - 1, begin - 1, -1):
            if row not in found:
                found |= self._expanded(batch, begin, row)
        return [found[row] for row in range(begin, self._next_row)]

    def keep(self, path: Sequence[int], surviving: Iterable[int]) -> None:
        self._committed += [self._rows[row][0] for row in path]
        self._rows = {row: self._rows[row] for row in surviving}

    def truncate(self, length: int) -> None:
        del self._committed[length:]
        self._rows = {}

    @property
    def memory(self) -> int:
        return self._engine.state_bytes

    def reopen(self, length: int, sampling: Sampling, vocabulary: int, *, exclusive: bool) -> "StatefulSequence":
        super().reopen(length, sampling, vocabulary, exclusive=exclusive)
        self._serve(sampling, vocabulary)
        return self

    def _serve(self, sampling: Sampling, vocabulary: int) -> None:
        """Set the request that the next calls are for."""
        self._sampling = sampling
        self._selector = self._engine.selector(vocabulary)

    def _expanded(self, batch: Batch, begin: int, row: int) -> dict[int, Candidates]:
        """Candidates of the node in `row` and of its ancestors in the batch, whose rows are `begin` and above."""
        above = self._ancestors(row)
        nodes = [each for each in above if each >= begin]
        path = [*self._committed, *(self._rows[each][0] for each in above)]
        behind = len(path) + 1 + batch.skipped
        positions = list(range(behind - len(nodes), behind))
        part = batch._replace(
            fans=[batch.fans[each - begin] for each in nodes] if batch.fans else (),
            paths=[batch.paths[each - begin] for each in nodes] if batch.paths else (),
        )
        self._selector.begin(self._sampling, positions)
        logits = self._engine.forward.run(self._cache, path, wanted=len(nodes))
        broken = ~np.isfinite(logits.max(axis=-1))
        # The candidates of such a row are dropped; the selector needs numbers.
        logits[broken] = 0
        chosen = self._selector.select(logits, positions, self._sampling, part)
        return {
            node: Candidates([], []) if flaw else candidates
            for node, candidates, flaw in zip(nodes, chosen, broken, strict=True)
        }

    def _ancestors(self, row: int) -> list[int]:
        """The rows from behind the committed prefix up to and with `row`."""
        reverse: list[int] = []
        while row in self._rows:
            reverse.append(row)
            row = self._rows[row][1]
        return reverse[::-1]
