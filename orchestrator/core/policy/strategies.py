"""The strategies by name. Options of the command line, the bench and the planner derive from this table. Pure."""

from orchestrator.core.policy.adaptive import Adaptive
from orchestrator.core.policy.decision import Strategy
from orchestrator.core.policy.in_turns import Autoregressive, Sequential
from orchestrator.core.policy.ssd import PublishedSsd

STRATEGIES: dict[str, type[Strategy]] = {
    strategy.name: strategy for strategy in (Autoregressive, Sequential, PublishedSsd, Adaptive)
}
