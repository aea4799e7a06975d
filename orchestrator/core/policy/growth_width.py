"""How a draft grows under `adaptive`: how many nodes a step evaluates, and which are worth one. Pure."""

from orchestrator.core.estimates import Estimates
from orchestrator.core.options import Options
from orchestrator.core.tuning import TUNING
from protocol.messages.plans import BestFirst


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
