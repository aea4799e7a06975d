"""What one draft grew below the root of one sequence, and what its guesses were worth. Pure."""

import math
from collections.abc import Sequence

from orchestrator.core.policy.estimates import Estimates
from orchestrator.core.speculation_cache import CommitOutcome, SpeculationCache
from protocol.messages.base import NodeId
from protocol.messages.worker import Grow
from protocol.speculation.token_tree import Node

_MIN_MEASURED_PREFILL = 64
"""A shorter prefill is too fast to tell the draft's speed."""
_MAX_MISSES = 64
"""Rounds that are remembered of a draft that is far behind."""


class Speculation:
    """The growth of one draft for one sequence.

    No two drafts share one: measurements belong to one draft, and children are sampled from one draft's
    distributions, as rejection sampling needs.
    """

    def __init__(self, root: NodeId, token: int, position: int, estimates: Estimates, wanted: bool, now: float) -> None:
        """`root` is the `token` at this absolute position; nothing is known below it. `wanted`: see the attribute."""
        self.cache = SpeculationCache(root, token, position)
        self.estimates = estimates
        self.grown_at = now
        """When the last growth arrived, or the draft was started."""
        self.wanted = wanted
        """The strategy uses a draft, and the draft has not refused this sequence."""
        self.drafting = False
        """The draft was started on this sequence and is not silent."""
        self.ready_at = now
        """When the draft will have prefilled what it was started with; infinite if that is unknown."""
        self._prefill: tuple[int, float] | None = None
        """Tokens of the prefill under way and when it began; None after the first growth."""
        self.plain = False
        """Nothing but the root may be verified."""
        self._missed: dict[int, float] = {}
        """When a round began with a miss, for rounds below whose root the draft has yet to grow."""

    def start(self, tokens: int, now: float) -> None:
        """The draft was sent a Start that makes it prefill so many tokens."""
        self.drafting = True
        self.grown_at = now
        self.ready_at = now + tokens * self.estimates.prefill.get(math.inf)
        self._prefill = (tokens, now)

    def prefills(self, tokens: int) -> None:
        """The draft prefills only so many tokens, because it has the KV of the others."""
        if self._prefill is not None:
            self._prefill = tokens, self._prefill[1]

    def merge(self, growth: Grow, vocabulary: int, now: float) -> None:
        """Take in what the draft grew, without tokens from `vocabulary` on."""
        self.cache.merge(growth, self.estimates.calibration, vocabulary)
        if growth.evaluated:
            # A draft may claim any time, but its step began after the growth before: that bounds what is waited for.
            seconds = min(growth.seconds, now - self.grown_at)
            self.estimates.step.observe(seconds)
            self.estimates.growth.observe(growth.joint or growth.evaluated, seconds)
            self._observe_prefill(seconds, now)
            self._observe_recovery(growth.round, now)
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
        if not outcome.hit and len(self._missed) < _MAX_MISSES:
            self._missed[round] = now
        return outcome

    def lag(self, since: float) -> float:
        """Seconds by which the draft was behind when the present round began, at `since`; 0 if it was not.

        Growth comes in order: a draft that has not grown below an earlier missed root needs at least as long again to
        grow below the present one.
        """
        return since - min(self._missed.values(), default=since)

    def distrust(self) -> None:
        """The target refuses what this draft grows."""
        self.plain = True
        self.drafting = self.wanted = False

    def _observe_prefill(self, step: float, now: float) -> None:
        """Measure the prefill at the first growth, whose step took `step` seconds."""
        if self._prefill is None:
            return
        tokens, since = self._prefill
        self._prefill, self.ready_at = None, now
        # Rounds that missed during the prefill tell nothing about how fast the draft recovers from a miss.
        self._missed.clear()
        if tokens >= _MIN_MEASURED_PREFILL:
            self.estimates.prefill.observe(max(0.0, now - since - step) / tokens)

    def _observe_recovery(self, round: int, now: float) -> None:
        """Measure the time from a miss to the first growth below the root of `round`."""
        if round in self._missed:
            self.estimates.recovery.observe(now - self._missed[round])
        self._missed = {later: began for later, began in self._missed.items() if later > round}
