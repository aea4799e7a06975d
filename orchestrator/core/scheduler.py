"""Whose trees the target verifies next, and when: one forward serves all requests that are ready for it. Pure."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.core.policy.decision import Decision, Strategy, VerifyNodes, WaitUntil
from orchestrator.core.sequence import Phase, Sequence
from protocol.messages.base import MAX_TREES, SequenceId
from protocol.messages.worker import Verify

_READING_SECONDS = 1.0
"""For so long a prompt that the target reads goes before the next round: a new request gets its first token after its
own prefill and one round, and the others do not stand still for longer."""
_STRAGGLING_SECONDS = 0.1
"""The answers of one forward come together: one that is so late was lost, and its request is asked again on its own."""


@dataclass(slots=True)
class _Round:
    """Trees in one forward."""

    unanswered: set[SequenceId]
    width: int
    """Tokens of the forward, roots included."""
    over_at: float | None = None
    """When missing answers are not waited for any more; known since the first one."""


class Scheduler:
    """One round of the target at a time. Requests take turns where they can't all be part of one."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._order: deque[SequenceId] = deque()
        """The one that was served longest ago first."""
        self._round: _Round | None = None
        self._held_since: float | None = None
        """Since when a round has waited for prompts that are being read."""
        self._new_went_first = False
        """The last round was for new requests alone."""
        self.wake_at: float | None = None
        """When to look again, though nothing has happened."""

    @property
    def unanswered(self) -> frozenset[SequenceId]:
        """Sequences whose trees are in the target's present forward."""
        return frozenset() if self._round is None else frozenset(self._round.unanswered)

    def join(self, sequence: SequenceId) -> None:
        self._order.append(sequence)

    def leave(self, sequence: SequenceId) -> None:
        self._order.remove(sequence)
        self.settled(sequence)

    def answered(self, sequence: SequenceId, now: float) -> int | None:
        """There is a verdict. The width of its forward, if this is the first one that tells of it."""
        self._order.remove(sequence)
        self._order.append(sequence)
        round = self._round
        if round is None or sequence not in round.unanswered:
            return None
        width = round.width if round.over_at is None else None
        round.over_at = round.over_at or now + _STRAGGLING_SECONDS
        self.settled(sequence)
        return width

    def settled(self, sequence: SequenceId) -> None:
        """Nothing more is expected of the target for this one."""
        if self._round is not None:
            self._round.unanswered.discard(sequence)
            if not self._round.unanswered:
                self._round = None

    def target_gone(self) -> None:
        self._round = self.wake_at = None

    def next(self, sequences: Mapping[SequenceId, Sequence], now: float) -> list[Verify]:
        """The trees of the next forward, now under verification; none while the target is busy or a wait pays."""
        self.wake_at = None
        free = [sequences[id] for id in self._order if sequences[id].phase is Phase.FREE][:MAX_TREES]
        if self._busy(now) or not free or self._reading(sequences, now):
            return []
        asked = []
        for sequence, decision in self._decisions(free, now):
            match decision:
                case VerifyNodes(nodes, gave_up):
                    sequence.speculation.drafting = sequence.speculation.drafting and not gave_up
                    asked.append(sequence.verify(nodes, now))
                case WaitUntil(until):
                    self.wake_at = until if self.wake_at is None else min(until, self.wake_at)
        if asked:
            self._round = _Round({verify.sequence for verify in asked}, sum(len(verify.tokens) for verify in asked))
            self.wake_at = None
        return asked

    def _decisions(self, free: list[Sequence], now: float) -> list[tuple[Sequence, Decision]]:
        """Who has no token yet goes before the others, plainly: such a round is short, and the first token there.
        But not twice in a row, or a stream of new requests would starve the others."""
        new = [sequence for sequence in free if not sequence.tally.rounds]
        self._new_went_first = 0 < len(new) < len(free) and not self._new_went_first
        if self._new_went_first:
            return [(sequence, VerifyNodes([])) for sequence in new]
        decided = self._strategy.decide_together([sequence.view(now) for sequence in free])
        return list(zip(free, decided, strict=True))

    def _busy(self, now: float) -> bool:
        if self._round is None:
            return False
        if self._round.over_at is not None and now >= self._round.over_at:
            self._round = None
            return False
        self.wake_at = self._round.over_at
        return True

    def _reading(self, sequences: Mapping[SequenceId, Sequence], now: float) -> bool:
        """Whether the round waits for a prompt."""
        if not any(sequence.phase is Phase.PREFILLING for sequence in sequences.values()):
            self._held_since = None
            return False
        self._held_since = now if self._held_since is None else self._held_since
        until = self._held_since + _READING_SECONDS
        if now >= until:
            self._held_since = None
            return False
        self.wake_at = until
        return True
