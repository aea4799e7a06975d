"""One draft that is up: the sequences that it serves, and whether it answers. Pure."""

from dataclasses import dataclass, field

from orchestrator.core.drafts.history import DraftHistory
from orchestrator.core.policy.decision import growth_timeout
from orchestrator.core.policy.estimates import Estimates
from protocol.messages.base import SequenceId
from protocol.messages.worker import Hello
from protocol.speculation.rolling_context import RollingContext

_PREFILL_SECONDS = 10.0
"""After so long without growth, a draft that prefills counts as silent too."""


@dataclass(slots=True)
class Draft:
    """`hello` is its own; `history` outlives it."""

    hello: Hello
    history: DraftHistory
    started: dict[SequenceId, int] = field(default_factory=dict)
    """Sequences that the draft serves, each with the round of its Start."""
    prefilling: set[SequenceId] = field(default_factory=set)
    """Those of them for which no growth has arrived yet."""
    _late_since: float | None = None
    """Since when the draft owes growth; None if it owes none."""

    def reads(self, tokens: int) -> int:
        """How many of so many tokens of a conversation it sees."""
        return tokens - RollingContext(self.hello.context).skipped(tokens)

    def start(self, sequence: SequenceId, round: int) -> None:
        self.started[sequence] = round
        self.prefilling.add(sequence)

    def stop(self, sequence: SequenceId) -> bool:
        """Returns whether the draft served the sequence."""
        self.prefilling.discard(sequence)
        self._late_since = None
        return self.started.pop(sequence, None) is not None

    def owes_growth(self, now: float) -> None:
        """A round missed, or the draft rested and was asked for a step."""
        if self._late_since is None:
            self._late_since = now

    def has_grown(self, sequence: SequenceId) -> None:
        self._late_since = None
        self.prefilling.discard(sequence)

    def silent(self, estimates: Estimates, now: float) -> bool:
        """The draft has owed growth for too long."""
        if self._late_since is None:
            return False
        limit = _PREFILL_SECONDS if self.prefilling else growth_timeout(estimates)
        return now - self._late_since > limit
