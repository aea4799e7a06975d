"""`adaptive`: the expected-rate rule decides every round, for all requests of the round together; and how a draft grows
under it: how many nodes a step evaluates, and which are worth one. Pure."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import accumulate, islice, pairwise, repeat
from typing import NamedTuple

from orchestrator.core.estimates import Estimates, GuessedBy, Instead
from orchestrator.core.expected_rate import Expected, best_counts, with_growth
from orchestrator.core.options import Options
from orchestrator.core.policy.decision import Decision, VerifyNodes, WaitUntil
from orchestrator.core.request import Request
from orchestrator.core.tuning import TUNING
from protocol.messages.base import MAX_STEPS
from protocol.messages.plans import BestFirst, GrowthPlan
from protocol.speculation.token_tree import Node


class Adaptive:
    """The expected-rate rule decides how many nodes to verify and whether to wait for growth."""

    name, summary = "adaptive", "the wait and the nodes with the highest expected tokens a second"
    drafts = caches = refreshes = True

    def __init__(self, options: Options) -> None:
        self._options = options

    def plan(self, estimates: Estimates, sharing: int, draft_tokens: int | None) -> GrowthPlan | None:
        return growth_plan(self._options, estimates, sharing)

    def decide(self, requests: Sequence[Request], now: float) -> list[Decision]:
        """The first of these rules that applies, for all requests of the round."""
        first = _let_drafts_read(requests, now) or _measure_a_plain_forward(requests)
        return first or self._wait_or_verify(requests, now)

    def _wait_or_verify(self, requests: Sequence[Request], now: float) -> list[Decision]:
        """Wait for growth if that is expected to pay, or if it is time to see whether it does; else verify the root of
        each request and the best nodes of all trees together."""
        estimates, lookup = requests[0].speculation.estimates, self._options.lookup == "on"
        most = int(min(self._options.max_verify, estimates.target.reach - 1))
        guesses = [candidates(request, most, lookup, len(requests)) for request in requests]
        in_turns, begins = requests[0].speculation.in_turns, not requests[0].speculation.steps
        usual = estimates.usual_rate if in_turns and len(requests) == 1 else None
        # The draft's forward behind a block has passed, and is in no rate of what is left of the round.
        by_surplus = usual if estimates.block > 1 and not begins else None
        costs = estimates.target, estimates.hop.get(0.0), by_surplus
        gains = [each.gains for each in guesses]
        counts, best = best_counts(gains, *costs)
        usual = best.rate if usual is None else usual
        owed = [self._owed_growth(request, each, now) for request, each in zip(requests, guesses, strict=True)]
        if in_turns and not begins:
            # What lookup adds behind a chain it mostly adds behind a longer one too: further steps are judged without.
            gains = [each.drafted for each in guesses]
            best = best_counts(gains, *costs)[1]
        wait = self._wait(requests, gains, owed, best, usual, now)
        # The first step below a root shows what steps give there, and is worth a small part of all time.
        round_worth = TUNING.explored * usual * estimates.target(1) if in_turns and begins else 0.0
        if wait is not None and wait.gain + round_worth * estimates.unasked > 0:
            instead = Instead(_guessed_by(requests[0], best), best)
            return [WaitUntil(wait.until, growth and growth.steps, instead) for growth in owed]
        soon = wait is not None and wait.gain + round_worth * (estimates.unasked + 1) > 0
        goes_on = not any(counts) and not soon and all(one.plain_rounds >= TUNING.plain_rounds for one in requests)
        return [VerifyNodes(each.nodes(count), goes_on=goes_on) for each, count in zip(guesses, counts, strict=True)]

    def _owed_growth(self, request: Request, guesses: "NodeChoice", now: float) -> "_OwedGrowth | None":
        """The next growth, if one can be waited for."""
        draft, estimates = request.speculation, request.speculation.estimates
        if not draft.drafting or not estimates.step.count or not estimates.target.known:
            return None
        if draft.in_turns and (estimates.gate.measuring or _has_taken_its_time(request, now)):
            return None
        if not guesses.open or guesses.open[0] < least_probability(self._options, estimates):
            return None  # the draft pauses
        due = _due(request, now)
        # A draft may claim any time for its steps, so the wait beyond the due time is bounded.
        give_up = due + min(estimates.slowest_step, TUNING.growth_wait)
        if give_up <= now or give_up == math.inf:
            return None
        return _OwedGrowth(due, give_up, guesses, _at_once(draft.steps, estimates) if draft.resting else None)

    def _wait(
        self,
        requests: Sequence[Request],
        gains: list[list[float]],
        owed: "list[_OwedGrowth | None]",
        best: Expected,
        usual: float,
        now: float,
    ) -> "_Wait | None":
        """What waiting for the next growth is expected to bring beside verifying the `best` count of the nodes with
        these `gains` at once; None if there is no growth to wait for.

        Both are compared by their surplus at the `usual` rate. One growth step serves several trees: growth that is due
        within half a step of the first is awaited together. Where the draft takes turns, a step may pay only with those
        behind it, so a few are looked at; a forward that guesses a block brings all of its steps. What the first one
        brings is measured.
        """
        growths = [growth for growth in owed if growth is not None]
        if not growths:
            return None
        estimates, in_turns = requests[0].speculation.estimates, requests[0].speculation.in_turns
        first = max(now, min(growth.due for growth in growths))
        awaited = [growth for growth in growths if growth.due <= first + 0.5 * estimates.step.get(0.0)]
        until = max(growth.give_up for growth in awaited)
        asked = estimates.asked[_guessed_by(requests[0], best)]
        if in_turns and asked.known and len(requests) == 1 and not requests[0].speculation.steps:
            return _Wait(until, asked.surplus(usual if best.nodes else estimates.plain_rate))
        shares, width = estimates.ranks.shares(self._options.draft_fan), growth_width(self._options, estimates)
        pause, margin = max(0.0, max(growth.due for growth in awaited) - now), TUNING.margin
        missed = not any(request.speculation.tree.root.children for request in requests)
        if missed and not in_turns and estimates.freshness is None and estimates.block == 1:
            margin += TUNING.margin_beside * pause / estimates.target(len(requests))
        wait, needed, gain = estimates.hop.get(0.0) + pause, usual * (1.0 + margin), -math.inf
        block = estimates.block
        later = [
            repeat(present)
            if growth not in awaited
            else islice(growth.guesses.gains_after_growth(width, shares), block - 1, None, block)
            for present, growth in zip(gains, owed, strict=True)
        ]
        for grown in islice(zip(*later, strict=False), TUNING.look_ahead if in_turns and block == 1 else 1):
            gain = max(gain, best_counts(grown, estimates.target, wait, needed)[1].surplus(needed))
            wait += estimates.next_response.get(estimates.step.get(0.0))
        return _Wait(until, gain - best.surplus(usual))


def _guessed_by(request: Request, best: Expected) -> GuessedBy:
    """Who has guesses of which the `best` count would be verified at once."""
    if not best.nodes:
        return "nobody"
    return "draft" if request.speculation.tree.root.children else "lookup"


def _let_drafts_read(requests: Sequence[Request], now: float) -> list[Decision]:
    """Wait while a draft on the target's device reads a prompt alone."""
    until = max(request.speculation.reading_until for request in requests)
    return [WaitUntil(until) for _ in requests] if until > now else []


def _measure_a_plain_forward(requests: Sequence[Request]) -> list[Decision]:
    """Verify the root alone, where forwards over one token have become so rare that their cost is not known."""
    draft, alone = requests[0].speculation, len(requests) == 1
    return [VerifyNodes([])] if alone and draft.in_turns and draft.estimates.target.narrow_due else []


def _has_taken_its_time(request: Request, now: float) -> bool:
    """Whether a draft in turns is asked no more below this root: it may answer each request with nothing that helps."""
    return (
        request.speculation.steps >= MAX_STEPS
        or now - request.ready_since > request.speculation.estimates.growth_timeout
    )


def _due(request: Request, now: float) -> float:
    """When the next growth should arrive."""
    draft, estimates = request.speculation, request.speculation.estimates
    # Behind a hit it is not known where in a block the draft is.
    inside = draft.steps % estimates.block and not request.began_with_hit
    step = 0.0 if inside else estimates.step.get(0.0)
    if draft.in_turns:
        # Steps beside the target, or while both load, take longer: hope, ask, and measure.
        first = estimates.first_response.get(0.0)
        response = estimates.next_response.get(first) if draft.steps else first
        begun = draft.grown_at + step if draft.steps else draft.asked_at + response
        due = now + response if draft.resting else begun
    elif not request.speculation.tree.root.children:
        # The step in flight grows the old root: its rest passes before the new root's step begins.
        due = request.ready_since + max(estimates.recovery.get(1.5 * step), draft.lag(request.ready_since))
    else:
        due = draft.grown_at + step
    return max(due, draft.ready_at + step) if draft.ready_at > now else due


def _at_once(taken: int, estimates: Estimates) -> int:
    """Up to which step to ask a resting draft, behind those `taken`. A forward that is asked for together with the one
    before saves a round trip, and is in vain where the answer shows that no further one pays."""
    sure, likely, steps = estimates.ranks.shares(1)[0], 1.0, 1
    least = estimates.step.get(0.0) / max(1e-9, estimates.next_response.get(0.0))
    while steps < TUNING.look_ahead and (likely := likely * sure) >= least:
        steps += 1
    return min(MAX_STEPS, taken + steps * estimates.block)


class _Wait(NamedTuple):
    until: float
    gain: float
    """Tokens, by the surplus."""


@dataclass(frozen=True, slots=True)
class _OwedGrowth:
    """Growth that the draft owes."""

    due: float
    """When it should arrive."""
    give_up: float
    """When to stop waiting for it."""
    guesses: "NodeChoice"
    """What it grows from."""
    steps: int | None
    """What to ask a resting draft for; None if the growth comes by itself."""


def candidates(request: Request, limit: int, lookup: bool, sharing: int) -> "NodeChoice":
    """At most `limit` nodes, with guesses by prompt lookup if `lookup`, of one of `sharing` requests."""
    if request.level == "tree":
        return TreeCandidates(request, limit, lookup)
    return PathCandidates(request, limit, lookup, max(limit, TUNING.searched * limit // sharing))


class TreeCandidates:
    """Any tree can be verified, so the best nodes are the most probable ones."""

    gains: list[float]
    """Expected tokens that each further node adds, guesses by prompt lookup included: n nodes yield the sum of the
    first n."""
    open: list[float]
    """Path probabilities of the nodes that the draft's next growth step may give children, falling; that of the root if
    the draft has grown nothing."""
    drafted: list[float]
    """`gains` of the draft's guesses alone."""

    def __init__(self, request: Request, limit: int, lookup: bool) -> None:
        self._limit = limit
        self._nodes = drafted = _most_probable(request, limit)
        self.gains = self.drafted = request.speculation.tree.path_probabilities(drafted)
        leaves = [path for node, path in zip(drafted, self.drafted, strict=True) if not node.children]
        self.open = leaves if request.speculation.tree.root.children else [1.0]
        if lookup and (guesses := self._guesses(request)):
            self._nodes = list(merge(drafted, guesses, key=lambda node: -node.log_path))[:limit]
            self.gains = request.speculation.tree.path_probabilities(self._nodes)

    def nodes(self, count: int) -> list[Node]:
        """The best `count` nodes, parents first."""
        return self._nodes[:count]

    def gains_after_growth(self, width: int, shares: Sequence[float]) -> Iterator[list[float]]:
        """`gains` of the draft's guesses after 1, 2, ... steps, each of which gives the `width` most probable open
        nodes children that are accepted with the probabilities `shares`."""
        found, open = self.drafted, self.open
        while True:
            found = with_growth(found, open[:width], shares)[: self._limit]
            yield found
            open = with_growth(open[width:], open[:width], shares)

    def _guesses(self, request: Request) -> list[Node]:
        """Guesses by prompt lookup behind the most probable leaf."""
        leaf = next((node for node in self._nodes or [request.speculation.tree.root] if not node.children), None)
        return [] if leaf is None else request.guesses_behind(leaf)


class PathCandidates:
    """One path can be verified: the best one of n nodes is that with the highest sum of path probabilities.

    The best paths of two lengths may differ, so `gains` need neither fall nor be positive. Names as in TreeCandidates.
    """

    def __init__(self, request: Request, limit: int, lookup: bool, searched: int) -> None:
        """`searched`: the number of most probable nodes that paths are made of."""
        root = request.speculation.tree.root
        drafted = _most_probable(request, searched)
        probabilities = request.speculation.tree.path_probabilities(drafted)
        leaves = [each for each in zip(drafted, probabilities, strict=True) if not each[0].children]
        self._open = leaves if root.children else [(root, 1.0)]
        self.open = [path for _, path in self._open]
        self._limit = limit
        self._paths = _BestPaths(root, limit)
        self._paths.add(drafted, probabilities)
        self.drafted = _differences(self._paths.totals)
        if lookup:
            for leaf in dict.fromkeys((root, self._paths.end)):
                guesses = request.guesses_behind(leaf)
                self._paths.add(guesses, request.speculation.tree.path_probabilities(guesses))
        self.gains = _differences(self._paths.totals)

    def nodes(self, count: int) -> list[Node]:
        return self._paths.nodes(count)

    def gains_after_growth(self, width: int, shares: Sequence[float]) -> Iterator[list[float]]:
        totals = list(accumulate(self.drafted, initial=0.0))
        ends = [(path, *self._paths.reached.get(node, (self._limit, 0.0))) for node, path in self._open[:width]]
        while True:
            ends = [
                (path * shares[0], length + 1, total + path * shares[0])
                for path, length, total in ends
                if length < self._limit
            ]
            for _, length, total in ends:
                if length == len(totals):
                    totals.append(total)
                else:
                    totals[length] = max(totals[length], total)
            yield _differences(totals)


NodeChoice = TreeCandidates | PathCandidates
"""Of one request, for one decision."""


class _BestPaths:
    """For each length up to a limit, the path below the root with the highest sum of path probabilities."""

    def __init__(self, root: Node, limit: int) -> None:
        self._limit = limit
        self.reached: dict[Node, tuple[int, float]] = {root: (0, 0.0)}
        """Length and sum of the path to each node."""
        self._ends: list[Node] = [root]
        """Of the best path of each length."""

    @property
    def totals(self) -> list[float]:
        """The highest sum for each length, from 0."""
        return [self.reached[end][1] for end in self._ends]

    @property
    def end(self) -> Node:
        """The end of the path with the highest sum."""
        return max(self._ends, key=lambda end: self.reached[end][1])

    def add(self, nodes: Iterable[Node], probabilities: Iterable[float]) -> None:
        """More `nodes`, parents first, with their path probabilities. Those beyond the limit are left out."""
        for node, path in zip(nodes, probabilities, strict=True):
            above = None if node.parent is None else self.reached.get(node.parent)
            if above is None or above[0] == self._limit:
                continue
            length, total = above[0] + 1, above[1] + path
            self.reached[node] = length, total
            if length == len(self._ends):
                self._ends.append(node)
            elif total > self.reached[self._ends[length]][1]:
                self._ends[length] = node

    def nodes(self, length: int) -> list[Node]:
        """The best path of this length, top down."""
        path: list[Node] = []
        node: Node | None = self._ends[length]
        while node is not None and len(path) < length:
            path.append(node)
            node = node.parent
        return path[::-1]


def _differences(totals: Sequence[float]) -> list[float]:
    return [after - before for before, after in pairwise(totals)]


def _most_probable(request: Request, limit: int) -> list[Node]:
    """The `limit` most probable nodes that the request still has room for, parents first."""
    deepest = request.speculation.tree.root.depth + request.room
    return list(islice((node for node in request.speculation.tree.best() if node.depth <= deepest), limit))


def growth_plan(options: Options, estimates: Estimates, sharing: int) -> BestFirst:
    """For one of `sharing` requests that share the draft's steps."""
    width = growth_width(options, estimates)
    share = max(min(TUNING.min_width, width), width // sharing)
    measuring = estimates.gate.measuring and sharing == 1
    steps = 0 if estimates.turns.in_turns or measuring else None
    return BestFirst(share, options.draft_fan, least_probability(options, estimates), steps, options.lookup == "on")


def growth_width(options: Options, estimates: Estimates) -> int:
    """Nodes that a growth step evaluates: `draft_width`, halved while the other half is expensive."""
    width, cost, expensive = options.draft_width, estimates.growth, TUNING.expensive_half
    while cost.known and width >= 2 * TUNING.min_width and cost(width) > expensive * cost(width // 2):
        width, expensive = width // 2, TUNING.steep_half
    return width


def least_probability(options: Options, estimates: Estimates) -> float:
    """Path probability that makes a node worth a growth step: work of the draft may slow the target down.

    By the expected-rate rule the target verifies a node whose path probability exceeds p = E T'(L) / T(L), where
    T' is the cost of one more token and E = 1 / (1 - a) the expected tokens of an endless chain. When the root
    moves, path probabilities rise, so the draft prepares nodes down to a share of p. In turns the target waits for
    each node, and a step is asked for below the root that is verified, so the share is larger.
    """
    cost, widest = estimates.target, options.max_verify + 1
    if not cost.known:
        return 0.0
    token_cost = max(0.0, cost(widest) - cost(1)) / (widest - 1)
    tokens = 1.0 / (1.0 - min(TUNING.max_acceptance, estimates.acceptance.get(0.0)))
    worth = tokens * token_cost / cost((widest + 1) // 2)
    if estimates.turns.in_turns and estimates.block == 1:
        return min(TUNING.max_least_in_turns, TUNING.prepared_in_turns * worth)
    return min(TUNING.max_least, TUNING.prepared * worth)
