"""Chooses among the answers to each prompt. Pure."""

from collections.abc import Sequence

from orchestrator.api.result import Result


def best(results: Sequence[Result], prompts: int, count: int) -> list[Result]:
    """The `count` answers of each prompt with the highest log-probability per token, best first. `results` are in the
    order of prompts and have likelihoods."""
    each = len(results) // prompts
    groups = [results[start : start + each] for start in range(0, len(results), each)]
    return [result for group in groups for result in sorted(group, key=_log_probability, reverse=True)[:count]]


def _log_probability(result: Result) -> float:
    chosen = [likelihood.chosen for likelihood in result.likelihoods]
    return sum(chosen) / len(chosen) if chosen else 0.0
