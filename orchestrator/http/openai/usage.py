"""Token counts of a response, as OpenAI's API has them. Pure."""

from collections.abc import Sequence
from typing import Any

from orchestrator.api.result import Result


def usage(results: Sequence[Result], prompts: int, reasoning_tokens: int = 0) -> dict[str, Any]:
    """`results` are in the order of prompts; a prompt counts once for all its choices."""
    each = len(results) // prompts
    prompt = sum(result.statistics.prompt_tokens for result in results[::each])
    completion = sum(result.statistics.generated_tokens for result in results)
    cached = sum(min(result.statistics.adopted_tokens, result.statistics.prompt_tokens) for result in results[::each])
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": min(reasoning_tokens, completion)},
    }
