"""Which requests run, which wait for a place, and whose trees share the target's next forward. Pure."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.core.phases import Phase
from orchestrator.core.policy.decision import Decision, Strategy, VerifyNodes, WaitUntil
from orchestrator.core.sequence import Sequence
from protocol.messages.base import MAX_TREES, SequenceId
from protocol.messages.worker import Verify

_PREFILL_PRIORITY_SECONDS = 1.0
"""A prompt that the target prefills delays the next round by so much at most: a new request gets its first token after
its own prefill and one round, and the running ones pause no longer than that."""
_STRAGGLER_SECONDS = 0.1
"""The verdicts of one forward arrive together. One that is later than this was lost: its tree is sent again alone."""


@dataclass(slots=True)
class _Round:
    """The trees of one forward."""

    unanswered: set[SequenceId]
    width: int
    """Tokens of the forward, roots included."""
    ends_at: float | None = None
    """When missing verdicts are not waited for any more; known since the first one."""


class Scheduler:
    """Requests get places in the order of arrival; the target has one round at a time for those that run.

    Round robin twice: a request makes room for a waiting one after `turn` tokens, and requests that do not fit into
    one forward take turns.
    """

    def __init__(self, strategy: Strategy, places: int, turn: int) -> None:
        """`places`: most requests that run at the same time; `turn`: tokens before a request makes room."""
        self._strategy = strategy
        self._places = places
        self._turn = turn
        self._running: dict[SequenceId, int] = {}
        """Tokens that each got since it was admitted."""
        self._waiting: deque[SequenceId] = deque()
        self._order: deque[SequenceId] = deque()
        """All requests; the one whose last verdict is oldest comes first."""
        self._round: _Round | None = None
        self._held_since: float | None = None
        """When the next round began to wait for prompts that the target prefills."""
        self._new_went_first = False
        """The last round was for new requests alone."""
        self.wake_at: float | None = None
        """When to schedule again although nothing has happened."""

    # Places -----------------------------------------------------------------------------------

    def add(self, sequence: SequenceId) -> bool:
        """Take in a request; whether it has a place at once."""
        self._order.append(sequence)
        if len(self._running) < self._places:
            self._running[sequence] = 0
            return True
        self._waiting.append(sequence)
        return False

    def remove(self, sequence: SequenceId) -> SequenceId | None:
        """Forget a request; the waiting one that gets its place, if there is one."""
        self._order.remove(sequence)
        self.settle(sequence)
        if self._running.pop(sequence, None) is None:
            self._waiting.remove(sequence)
            return None
        return self._next_waiting()

    def preempt(self, sequence: SequenceId, tokens: int) -> SequenceId | None:
        """A running request got `tokens` more; the waiting one that takes its place, if its turn is over."""
        self._running[sequence] += tokens
        if self._running[sequence] < self._turn or not self._waiting:
            return None
        del self._running[sequence]
        successor = self._next_waiting()
        self._waiting.append(sequence)
        return successor

    def _next_waiting(self) -> SequenceId | None:
        if not self._waiting:
            return None
        successor = self._waiting.popleft()
        self._running[successor] = 0
        return successor

    # Rounds -----------------------------------------------------------------------------------

    @property
    def unanswered(self) -> frozenset[SequenceId]:
        """Sequences whose trees are in the target's present forward."""
        return frozenset() if self._round is None else frozenset(self._round.unanswered)

    def answered(self, sequence: SequenceId, now: float) -> int | None:
        """A verdict arrived. The width of its forward in tokens, if this is the forward's first verdict."""
        self._order.remove(sequence)
        self._order.append(sequence)
        round = self._round
        if round is None or sequence not in round.unanswered:
            return None
        width = round.width if round.ends_at is None else None
        round.ends_at = round.ends_at or now + _STRAGGLER_SECONDS
        self.settle(sequence)
        return width

    def settle(self, sequence: SequenceId) -> None:
        """Expect no verdict for this sequence."""
        if self._round is not None:
            self._round.unanswered.discard(sequence)
            if not self._round.unanswered:
                self._round = None

    def lose_target(self) -> None:
        self._round = self.wake_at = None

    def schedule(self, sequences: Mapping[SequenceId, Sequence], now: float) -> list[Verify]:
        """The trees of the next forward, now under verification; none while the target is busy or a wait pays."""
        self.wake_at = None
        ready = [sequences[id] for id in self._order if sequences[id].phase is Phase.READY][:MAX_TREES]
        if self._busy(now) or not ready or self._prefill_first(sequences, now):
            return []
        trees = []
        for sequence, decision in self._decisions(ready, now):
            match decision:
                case VerifyNodes(nodes, gave_up):
                    sequence.speculation.drafting = sequence.speculation.drafting and not gave_up
                    trees.append(sequence.verify(nodes, now))
                case WaitUntil(until):
                    self.wake_at = until if self.wake_at is None else min(until, self.wake_at)
        if trees:
            self._round = _Round({tree.sequence for tree in trees}, sum(len(tree.tokens) for tree in trees))
            self.wake_at = None
        return trees

    def _decisions(self, ready: list[Sequence], now: float) -> list[tuple[Sequence, Decision]]:
        """Requests without a token go before the others, by plain decoding: the round is short, and their first token
        early. Never twice in a row, or a stream of new requests would starve the others."""
        new = [sequence for sequence in ready if not sequence.stats.rounds]
        self._new_went_first = 0 < len(new) < len(ready) and not self._new_went_first
        if self._new_went_first:
            return [(sequence, VerifyNodes([])) for sequence in new]
        decided = self._strategy.decide_together([sequence.view(now) for sequence in ready])
        return list(zip(ready, decided, strict=True))

    def _busy(self, now: float) -> bool:
        if self._round is None:
            return False
        if self._round.ends_at is not None and now >= self._round.ends_at:
            self._round = None
            return False
        self.wake_at = self._round.ends_at
        return True

    def _prefill_first(self, sequences: Mapping[SequenceId, Sequence], now: float) -> bool:
        """Whether the round waits for a prompt that the target prefills."""
        if not any(sequence.phase is Phase.PREFILLING for sequence in sequences.values()):
            self._held_since = None
            return False
        self._held_since = now if self._held_since is None else self._held_since
        until = self._held_since + _PREFILL_PRIORITY_SECONDS
        if now >= until:
            self._held_since = None
            return False
        self.wake_at = until
        return True
