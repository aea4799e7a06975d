"""What one draft grew below the root of one sequence, and what its guesses were worth. Pure."""

import math
from collections.abc import Sequence

from orchestrator.core.policy.estimates import Estimates
from orchestrator.core.speculation_cache import CommitOutcome, SpeculationCache
from protocol.messages.base import NodeId
from protocol.messages.worker import Grow
from protocol.speculation.token_tree import Node

_TELLING = 64
"""Fewer tokens are read too fast to say how fast."""
_MISSES_KEPT = 64
"""Rounds of a draft that is far behind; of one that is gone, none need be known."""


class Speculation:
    """No two drafts grow the same one: what is measured here is said of one draft, and children are drawn from
    one draft's distributions, as rejection sampling needs."""

    def __init__(self, root: NodeId, token: int, position: int, estimates: Estimates, wanted: bool, now: float) -> None:
        """Nothing is known yet below `root`, which is the `token` at this absolute position."""
        self.cache = SpeculationCache(root, token, position)
        self.estimates = estimates
        self.grown_at = now
        """When the last growth arrived, or the draft was started."""
        self.wanted = wanted
        """A draft can be of use: the strategy wants one, and it has not refused this sequence."""
        self.drafting = False
        """The draft was told of this sequence and has not fallen silent."""
        self.ready_at = now
        """When the draft will have read what it was told to start with; infinite if nobody knows."""
        self._reading: tuple[int, float] | None = None
        """Tokens that it reads and since when, until it grows."""
        self.plain = False
        """Nothing but the root may be verified."""
        self._missed: dict[int, float] = {}
        """When a round began with a miss, for those below whose root the draft has yet to grow."""

    def start(self, unread: int, now: float) -> None:
        """The draft was told to begin here, which makes it read so many tokens."""
        self.drafting = True
        self.grown_at = now
        self.ready_at = now + unread * self.estimates.reading.get(math.inf)
        self._reading = (unread, now)

    def reads(self, unread: int) -> None:
        """The draft has the KV of the others: it reads only so many tokens."""
        if self._reading is not None:
            self._reading = unread, self._reading[1]

    def merge(self, growth: Grow, vocabulary: int, now: float) -> None:
        """Take in what the draft grew; no token from `vocabulary` on."""
        self.cache.merge(growth, self.estimates.calibration, vocabulary)
        if growth.evaluated:
            self.estimates.step.observe(growth.seconds)
            self.estimates.growth.observe(growth.joint or growth.evaluated, growth.seconds)
            self._read(growth.seconds, now)
            self._recover(growth.round, now)
        self.grown_at = now
        self.drafting = True

    def learn(self, tokens: Sequence[int]) -> None:
        """Compare what was believed with the `tokens` that the target chose below the root."""
        self.estimates.usefulness.observe(None if self.cache.empty else tokens[0] in self.cache.root.children)
        node: Node | None = self.cache.root
        for token in tokens:
            if node is None:
                return
            for rank, child in enumerate(node.children.values()):
                self.estimates.calibration.observe(child.probability, rank, child.token == token)
            if node.main_child is not None:
                self.estimates.acceptance.observe(float(node.main_child.token == token))
            node = node.children.get(token)

    def advance(self, tokens: Sequence[int], round: int, now: float) -> CommitOutcome:
        """Move the root to the last of `tokens`, where `round` begins."""
        outcome = self.cache.advance(tokens)
        if not outcome.hit and len(self._missed) < _MISSES_KEPT:
            self._missed[round] = now
        return outcome

    def owing(self, since: float) -> float:
        """For how long the draft had not grown below a root that was missed when the present round began, `since`:
        the present root takes it no less, since growth comes in order. 0 if it owed nothing."""
        return since - min(self._missed.values(), default=since)

    def distrust(self) -> None:
        """The target can't take what this draft grows."""
        self.plain = True
        self.drafting = self.wanted = False

    def _read(self, step: float, now: float) -> None:
        """The first growth, which took `step` seconds, has come."""
        if self._reading is None:
            return
        unread, since = self._reading
        self._reading, self.ready_at = None, now
        # Rounds that missed meanwhile tell nothing of how fast a draft that has read recovers.
        self._missed.clear()
        if unread >= _TELLING:
            self.estimates.reading.observe(max(0.0, now - since - step) / unread)

    def _recover(self, round: int, now: float) -> None:
        """The draft grew below the root of `round`."""
        if round in self._missed:
            self.estimates.recovery.observe(now - self._missed[round])
        self._missed = {later: began for later, began in self._missed.items() if later > round}
