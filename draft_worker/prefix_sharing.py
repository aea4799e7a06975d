"""What other sequences have read is not read again. Knows no messages' flow and no model."""

from collections.abc import Iterable
from typing import NamedTuple

from draft_worker.engine import Engine, EngineSequence
from draft_worker.sequence import DraftSequence
from protocol.kv.prefix_cache import MIN_SHARED_TOKENS, PrefixCache
from protocol.messages.worker import Start


class Opened(NamedTuple):
    """An engine's sequence that has the first `held` tokens of a start."""

    engine: EngineSequence
    held: int


class PrefixSharing:
    """KV stays in this process: no message tells of it, and a draft that dies takes it along."""

    def __init__(self, engine: Engine, limit: int) -> None:
        """`limit`: bytes of KV whose sequences are over; 0 for no reuse at all."""
        self._engine = engine
        self._limit = limit
        self._kept: PrefixCache[EngineSequence] = PrefixCache(limit, lambda kept: kept.close())

    def open(self, start: Start, live: Iterable[DraftSequence]) -> Opened:
        """A sequence for `start`, with the longest prefix that one that is over, or one of `live`, shares with it."""
        vocabulary = start.vocabulary or self._engine.vocabulary
        wanted = start.tokens[:-1]
        # What an earlier life left of this very sequence is more than anybody else has of it.
        found = self._kept.take(wanted, lambda kept: kept.copyable) if start.adopt is None else None
        if found is not None:
            kept = found.kv.reopen(found.tokens, start.sampling, vocabulary, exclusive=found.free)
            return Opened(kept, found.tokens)
        if self._limit and start.adopt is None:
            lender = max(live, key=lambda sequence: sequence.shared(wanted), default=None)
            shared = 0 if lender is None else lender.shared(wanted)
            if lender is not None and shared >= MIN_SHARED_TOKENS and lender.engine.copyable:
                return Opened(lender.engine.reopen(shared, start.sampling, vocabulary, exclusive=False), shared)
        return Opened(self._engine.open(start.sampling, vocabulary), 0)

    def reader(self, sequence: DraftSequence, live: Iterable[DraftSequence]) -> DraftSequence:
        """Who reads next so that `sequence` reads least: of all that are being read and begin alike the first one.

        What others have read meanwhile, it takes from them. `live`: all sequences, in the order of their starts.
        """
        if not self._limit:
            return sequence
        live = list(live)
        wanted = sequence.committed
        lender = max(live, key=lambda other: other.shared(wanted))
        if lender.shared(wanted) >= len(sequence.held) + MIN_SHARED_TOKENS and lender.engine.copyable:
            self._copy(lender, sequence, lender.shared(wanted))
        for other in live[: live.index(sequence)]:
            if other.reading and other.alike(wanted) >= max(len(other.held), len(sequence.held)) + MIN_SHARED_TOKENS:
                return other
        return sequence

    def _copy(self, lender: DraftSequence, sequence: DraftSequence, shared: int) -> None:
        vocabulary = sequence.vocabulary or self._engine.vocabulary
        sequence.engine.close()
        sequence.take_over(lender.engine.reopen(shared, sequence.sampling, vocabulary, exclusive=False), shared)

    def keep(self, sequence: DraftSequence) -> None:
        """The sequence is over."""
        engine = sequence.engine
        if self._limit and engine.memory:
            engine.truncate(len(sequence.held))
            self._kept.keep(engine, sequence.held, engine.memory)
        else:
            engine.close()
