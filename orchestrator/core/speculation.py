"""The speculation cache of one draft for one sequence: its token tree, and what its guesses were worth. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from msgspec import structs

from orchestrator.core.policy.estimates import Estimates
from protocol.messages.base import NodeId
from protocol.messages.plans import BestFirst, Distribution, GrowthPlan
from protocol.messages.worker import Grow
from protocol.speculation.token_tree import Node, TokenTree

_MAX_NODES = 1 << 13
"""Twice what any plan keeps. It bounds the memory, and the time of a commit, whatever a draft sends."""
_MAX_CHILDREN = 256
"""Children of one node: four times what any plan asks for. The search for the most probable path visits all of them."""
_MIN_MEASURED_PREFILL = 64
"""Tokens. A shorter prefill is too fast to measure the draft's speed."""
_UNKNOWN_READING, _LEAST_READING = 2.0, 0.2
"""Seconds that the target waits at most while a draft reads the prompt: one of unknown speed, and any."""
_MAX_MISSES = 64
"""Missed rounds that are remembered of a draft that is far behind."""


class Speculation:
    """What one draft grew below the root of one sequence.

    No two drafts share a Speculation: measurements belong to one draft, and children are sampled from one draft's
    distributions, as rejection sampling needs. Nodes keep their ids when the root moves, so growth may arrive late,
    twice or out of order.
    """

    def __init__(self, root: NodeId, token: int, position: int, estimates: Estimates, wanted: bool, now: float) -> None:
        """`root` is the `token` at this absolute position; the tree is empty. `wanted`: see the attribute."""
        self.tree = TokenTree(root, token, position)
        self.estimates = estimates
        self.grown_at = now
        """When the last growth arrived, or when the draft was started."""
        self.wanted = wanted
        """The strategy uses a draft, and the draft has not refused this sequence."""
        self.drafting = False
        """The draft was started on this sequence and is not silent."""
        self.ready_at = now
        """When the draft will have prefilled the tokens of its Start; infinite if that is unknown."""
        self.steps = 0
        """Growth steps of the draft since it knows the present root."""
        self.asked_at = now
        """When the draft was last asked for a step."""
        self._asked = 0
        """Steps below the root that a draft was asked for, if it drafts in turns."""
        self._plan: GrowthPlan | None = None
        """How the draft grows."""
        self.root_only = False
        """The target refused this draft's tree: only the root may be verified."""
        self._prefill: tuple[int, float] | None = None
        """Tokens of the prefill in progress and when it began; None after the first growth."""
        self._round: int | None = None
        """The round of the root; None for the first root of this speculation."""
        self._missed_at: dict[int, float] = {}
        """When a round began with a miss, for rounds below whose root the draft has not grown yet."""
        self._distributions: dict[NodeId, Distribution] = {}

    def start(self, tokens: int, now: float) -> None:
        """The draft was sent a Start and has to prefill `tokens` tokens."""
        self.drafting = True
        self.grown_at = now
        self.ready_at = now + tokens * self.estimates.prefill.get(math.inf)
        self._prefill = (tokens, now)

    def at_work_since(self, sent: float) -> bool:
        """Whether the draft reads the prompt, or a step of it has ended after `sent`."""
        return self._prefill is not None or self.grown_at > sent

    def follow(self, plan: GrowthPlan | None) -> GrowthPlan | None:
        """The plan that the draft is sent. While it prefills nobody knows when to ask it: if it takes turns, it takes
        one step then, and rests."""
        if isinstance(plan, BestFirst) and plan.steps is not None and self._prefill is not None:
            plan = structs.replace(plan, steps=1)
        self._plan = plan
        return plan

    @property
    def in_turns(self) -> bool:
        """The draft rests until it is asked for a step."""
        return isinstance(self._plan, BestFirst) and self._plan.steps is not None

    @property
    def takes_turns(self) -> bool:
        """The draft can rest, and does so if that is the present mode."""
        return isinstance(self._plan, BestFirst) and self.in_turns == self.estimates.turns.in_turns

    @property
    def settled(self) -> bool:
        """It is known whether the draft should rest, or it can't."""
        return not isinstance(self._plan, BestFirst) or self.estimates.turns.settled

    @property
    def resting(self) -> bool:
        """The draft drafts in turns and has taken all steps that it was asked for: it owes no growth."""
        return self.in_turns and self.steps >= self._asked

    def ask(self, steps: int, now: float) -> None:
        """The draft was asked to grow up to `steps` steps below the root."""
        self._asked, self.asked_at = steps, now
        self.estimates.unasked = 0

    @property
    def reading_until(self) -> float:
        """Until when the target lets a draft on its device read the prompt alone; 0 if it reads none."""
        if not (self.in_turns and self.prefilling):
            return 0.0
        expected = self.ready_at - self.grown_at
        return self.grown_at + (_UNKNOWN_READING if expected == math.inf else max(_LEAST_READING, 2.0 * expected))

    @property
    def prefilling(self) -> bool:
        """The draft was started and has not grown yet."""
        return self._prefill is not None

    def shorten_prefill(self, tokens: int) -> None:
        """The draft prefills only `tokens` tokens, because it has the KV of the others."""
        if self._prefill is not None:
            self._prefill = tokens, self._prefill[1]

    def merge(self, growth: Grow, vocabulary: int, now: float) -> None:
        """Add what the draft grew, as far as there is room, without tokens from `vocabulary` on.

        A node whose parent is not in the tree is left out.
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
        for distribution in growth.distributions:
            if distribution.node in tree:
                # The node's first child was sampled from the first one: a draft that evaluates a node again, with
                # other features or after its context has rolled, has another one.
                self._distributions.setdefault(distribution.node, distribution)
        if growth.evaluated:
            if self._round is None or growth.round == self._round:
                self.steps += 1
                if self.in_turns and self.steps == self._asked:
                    estimates = self.estimates
                    response = estimates.first_response if self.steps == 1 else estimates.next_response
                    response.observe(now - self.asked_at)
            # A draft may claim any time, but its step began after the growth before: that bounds the time.
            seconds = min(growth.seconds, now - self.grown_at)
            self.estimates.observe_step(seconds)
            self.estimates.growth.observe(growth.forward_nodes or growth.evaluated, seconds)
            self._observe_prefill(seconds, now)
            self._observe_recovery(growth.round, now)
        self.grown_at = now
        self.drafting = True

    def distributions(self, nodes: Sequence[Node]) -> tuple[Distribution, ...]:
        """The draft distributions that `nodes` were sampled from, where they are known."""
        parents = (node.parent.id for node in nodes if node.parent is not None)
        return tuple(self._distributions[parent] for parent in parents if parent in self._distributions)

    def observe(self, tokens: Sequence[int]) -> "Settlement":
        """Compare what was believed with the `tokens` that the target chose below the root."""
        node: Node | None = self.tree.root
        self.estimates.usefulness.observe(tokens[0] in node.children if node.children else None)
        settlement = Settlement(self)
        for token in tokens:
            if node is None:
                break
            children = node.children
            settlement.chosen.append((node, len(children), token))
            if children:
                rank = next((rank for rank, guess in enumerate(children) if guess == token), None)
                self.estimates.acceptance.observe(float(rank == 0))
                self.estimates.ranks.observe(len(children), rank)
            node = children.get(token)
        return settlement

    def commit(self, tokens: Sequence[int], round: int, now: float) -> "Settlement":
        """Observe `tokens` and commit them; the last one, the bonus, becomes the root of `round`."""
        settlement = self.observe(tokens)
        end = self.tree.root
        for token in tokens[:-1]:
            end = end.children.get(token) or self.tree.add(end, token, 1.0)
        settlement.outcome = len(end.children), tokens[-1] in end.children
        self.tree.move_root(tokens)
        self._round, self.steps, self._asked, self.asked_at = round, 0, 0, now
        self.estimates.unasked += self.in_turns and self.drafting
        settlement.hit = bool(self.tree.root.children)
        if not settlement.hit and len(self._missed_at) < _MAX_MISSES:
            self._missed_at[round] = now
        return settlement

    def begin_anew(self, round: int, now: float) -> None:
        """Drop the guesses below the root of `round`, which is a hit: the draft grows other ones."""
        self.tree.root.children.clear()
        self._missed_at[round] = now

    def prune(self) -> None:
        """Forget what is no longer below the root."""
        self.tree.prune()
        if self._distributions:
            self._distributions = {node: q for node, q in self._distributions.items() if node in self.tree}

    def lag(self, since: float) -> float:
        """Seconds by which the draft was behind when the present round began, at `since`; 0 if it was not.

        Growth comes in order: a draft that has not grown below an earlier missed root needs at least as long again to
        grow below the present one.
        """
        return since - min(self._missed_at.values(), default=since)

    def refuse(self) -> None:
        """The target refuses what this draft grows."""
        self.root_only = True
        self.drafting = self.wanted = False

    def _observe_prefill(self, step: float, now: float) -> None:
        """Measure the prefill at the first growth, whose step took `step` seconds."""
        if self._prefill is None:
            return
        tokens, since = self._prefill
        self._prefill, self.ready_at = None, now
        # Misses during the prefill do not show how fast the draft recovers from a miss.
        self._missed_at.clear()
        if tokens >= _MIN_MEASURED_PREFILL:
            self.estimates.prefill.observe(max(0.0, now - since - step) / tokens)

    def _observe_recovery(self, round: int, now: float) -> None:
        """Measure the time from a miss to the first growth below the root of `round`."""
        if round in self._missed_at:
            self.estimates.recovery.observe(now - self._missed_at[round])
        self._missed_at = {later: began for later, began in self._missed_at.items() if later > round}


@dataclass(slots=True)
class Settlement:
    """The part of a round's bookkeeping that growth and growth plans need, and no decision about the next round."""

    speculation: Speculation
    chosen: list[tuple[Node, int, int]] = field(default_factory=list)
    """The nodes on the chosen path, each with its number of children then and the token that the target chose behind
    it."""
    outcome: tuple[int, bool] | None = None
    """The number of guesses for the bonus token, and whether one was right; None if nothing was committed."""
    hit: bool = False
    """The new root has children."""

    def apply(self) -> None:
        """Calibrate the draft's claims, and prune its tree."""
        estimates = self.speculation.estimates
        for node, guesses, token in self.chosen:
            # The commit may have added a child behind the guesses.
            for rank, child in enumerate(islice(node.children.values(), guesses)):
                estimates.calibration.observe(child.probability, rank, child.token == token)
        if self.outcome is not None:
            estimates.hits.observe(*self.outcome)
        self.speculation.prune()
