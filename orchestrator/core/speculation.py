"""The speculation cache of one draft for one request: its token tree, and what the draft does for it. Pure."""

import math
from collections.abc import Sequence

from msgspec import structs

from orchestrator.core.estimates import Estimates, GrowthStep
from orchestrator.core.phases import DRAFT_TRANSITIONS, DRAFTING, DraftPhase, DraftTrigger
from orchestrator.core.tuning import TUNING
from protocol.messages.base import NodeId
from protocol.messages.plans import BestFirst, GrowthPlan
from protocol.messages.worker import Grow
from protocol.speculation.token_tree import TokenTree

_MAX_NODES = 1 << 13
"""Twice what any plan keeps. It bounds the memory, and the time of a commit, whatever a draft sends."""
_MAX_CHILDREN = 256
"""Children of one node: four times what any plan asks for. The search for the most probable path visits all of them."""
_MAX_MISSES = 64
"""Missed rounds that are remembered of a draft that is far behind."""


class Speculation:
    """What one draft grew below the root of one request.

    No two drafts share a Speculation: measurements belong to one draft. Nodes keep their ids when the root moves, so
    growth may arrive late, twice or out of order.
    """

    def __init__(self, root: NodeId, token: int, position: int, estimates: Estimates, wanted: bool, now: float) -> None:
        """`root` is the `token` at this absolute position; the tree is empty. `wanted`: the strategy uses a draft."""
        self.tree = TokenTree(root, token, position)
        self.estimates = estimates
        self.phase = DraftPhase.ABSENT if wanted else DraftPhase.UNWANTED
        self.grown_at = now
        """When the last growth arrived, or when the draft was started."""
        self.ready_at = now
        """When the draft will have prefilled the tokens of its Start; infinite if that is unknown."""
        self.steps = 0
        """Growth steps of the draft since it knows the present root."""
        self.asked_at = now
        """When the draft was last asked for a step."""
        self._asked = 0
        """Steps below the root that a draft was asked for, if it drafts in turns."""
        self._alone = 0
        """The next of them when it was asked last, if that was for one forward alone."""
        self.in_turns = False
        """The draft rests until it is asked for a step."""
        self.can_rest = False
        """The draft rests if that is the present mode."""
        self._reading: tuple[int, float] | None = None
        """Tokens of the prefill in progress and when it began; None after the first growth."""
        self._round: int | None = None
        """The round of the root; None for the first root of this speculation."""
        self._missed_at: dict[int, float] = {}
        """When a round began with a miss, for rounds below whose root the draft has not grown yet."""

    # The draft's phases -----------------------------------------------------------------------

    def enter(self, trigger: DraftTrigger) -> None:
        """Move to the phase that follows. Raises AssertionError for a transition that is not in the table."""
        following = DRAFT_TRANSITIONS.get((self.phase, trigger))
        assert following is not None, f"no transition of a draft from {self.phase.name} by {trigger.name}"
        self.phase = following

    def start(self, tokens: int, now: float) -> None:
        """The draft was sent a Start and has to prefill `tokens` tokens."""
        self.enter(DraftTrigger.START)
        self.grown_at = now
        self.ready_at = now + tokens * self.estimates.prefill.get(math.inf)
        self._reading = (tokens, now)

    def stop(self) -> None:
        """No draft serves the request any more. The tree stays."""
        self.enter(DraftTrigger.STOP)

    @property
    def wanted(self) -> bool:
        """A draft may serve the request."""
        return self.phase not in (DraftPhase.UNWANTED, DraftPhase.REFUSED)

    @property
    def drafting(self) -> bool:
        """A draft serves the request and is not late."""
        return self.phase in DRAFTING

    @property
    def reading(self) -> bool:
        """The draft was started and has not grown yet."""
        return self._reading is not None

    @property
    def settled(self) -> bool:
        """It is known whether the draft should rest, or it can't."""
        return not self.can_rest or self.estimates.turns.settled

    @property
    def resting(self) -> bool:
        """The draft drafts in turns and owes no growth that it was asked for."""
        return self.in_turns and self.phase in (DraftPhase.READING, DraftPhase.RESTING)

    @property
    def reading_until(self) -> float:
        """Until when the target lets a draft on its device read the prompt alone; 0 if it reads none."""
        if not (self.in_turns and self.reading):
            return 0.0
        expected = self.ready_at - self.grown_at
        known = expected != math.inf
        return self.grown_at + (max(TUNING.least_reading, 2.0 * expected) if known else TUNING.unknown_reading)

    def at_work_since(self, sent: float) -> bool:
        """Whether the draft reads the prompt, or a step of it has ended after `sent`."""
        return self.reading or self.grown_at > sent

    def lag(self, since: float) -> float:
        """Seconds by which the draft was behind when the present round began, at `since`; 0 if it was not.

        Growth comes in order: a draft that has not grown below an earlier missed root needs at least as long again to
        grow below the present one.
        """
        return since - min(self._missed_at.values(), default=since)

    # What the draft is told -------------------------------------------------------------------

    def follow(self, plan: GrowthPlan | None) -> GrowthPlan | None:
        """The plan that the draft is sent. While it prefills nobody knows when to ask it: if it takes turns, it takes
        one step then, and rests."""
        if isinstance(plan, BestFirst) and plan.steps is not None and self.reading:
            plan = structs.replace(plan, steps=1)
        self.can_rest = isinstance(plan, BestFirst)
        self.in_turns = isinstance(plan, BestFirst) and plan.steps is not None
        if self.phase in (DraftPhase.GROWING, DraftPhase.RESTING):
            self._rest_or_grow()
        return plan

    def ask(self, steps: int, now: float) -> None:
        """The draft was asked to grow up to `steps` steps below the root."""
        self.enter(DraftTrigger.ASK)
        self._alone = self.steps + 1 if steps <= self.steps + self.estimates.block else 0
        self._asked, self.asked_at = steps, now

    def shorten_prefill(self, tokens: int) -> None:
        """The draft prefills only `tokens` tokens, because it has the KV of the others."""
        if self._reading is not None:
            self._reading = tokens, self._reading[1]

    # The tree ---------------------------------------------------------------------------------

    def merge(self, growth: Grow, vocabulary: int, now: float) -> GrowthStep | None:
        """Add what the draft grew, as far as there is room, without tokens from `vocabulary` on.

        A node whose parent is not in the tree is left out. Returns what the growth says of the draft's speed, if it
        ends a step.
        """
        tree, calibration = self.tree, self.estimates.calibration
        for parent_id, token, claimed in zip(growth.parents, growth.tokens, growth.probabilities, strict=True):
            parent = tree.get(parent_id)
            if (
                parent is not None
                and token < vocabulary
                and len(tree) < _MAX_NODES
                and len(parent.children) < _MAX_CHILDREN
            ):
                tree.add(parent, token, claimed, calibration(claimed, len(parent.children)))
        step = self._end_step(growth, now) if growth.evaluated else None
        self._rest_or_grow()
        self.grown_at = now
        return step

    def _end_step(self, growth: Grow, now: float) -> GrowthStep:
        response = None
        if self._round is None or growth.round == self._round:
            self.steps += 1
            if self.in_turns and self.steps == self._alone:
                response = now - self.asked_at
        # A draft may claim any time, but its step began after the growth before: that bounds the time.
        seconds, read = min(growth.seconds, now - self.grown_at), None
        if self._reading is not None:
            tokens, since = self._reading
            read = tokens, max(0.0, now - since - seconds)
            self._reading, self.ready_at = None, now
            # Misses during the prefill do not show how fast the draft recovers from a miss.
            self._missed_at.clear()
        missed_at = self._missed_at.get(growth.round)
        self._missed_at = {later: began for later, began in self._missed_at.items() if later > growth.round}
        recovery = None if missed_at is None else now - missed_at
        return GrowthStep(growth.forward_nodes or growth.evaluated, seconds, response, self.steps == 1, read, recovery)

    def _rest_or_grow(self) -> None:
        self.enter(DraftTrigger.REST if self.in_turns and self.steps >= self._asked else DraftTrigger.GROW)

    def commit(self, tokens: Sequence[int], round: int, now: float) -> bool:
        """Commit `tokens`; the last one, the bonus, becomes the root of `round`. Returns whether that is a hit: the new
        root has children."""
        end = self.tree.root
        for token in tokens[:-1]:
            end = end.children.get(token) or self.tree.add(end, token, 1.0)
        self.tree.move_root(tokens)
        self._round, self.steps, self._asked, self._alone, self.asked_at = round, 0, 0, 0, now
        if self.phase in (DraftPhase.GROWING, DraftPhase.RESTING):
            self._rest_or_grow()
        hit = bool(self.tree.root.children)
        if not hit and len(self._missed_at) < _MAX_MISSES:
            self._missed_at[round] = now
        return hit

    def begin_anew(self, round: int, now: float) -> None:
        """Drop the guesses below the root of `round`, which is a hit: the draft grows other ones."""
        self.tree.root.children.clear()
        self._missed_at[round] = now

    def prune(self) -> None:
        """Forget what is no longer below the root."""
        self.tree.prune()
