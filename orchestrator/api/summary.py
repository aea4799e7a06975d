"""The figures of one generation as names and words: its speed, and how the speculation went. Pure."""

from collections.abc import Iterator

from protocol.messages.client import Pace, Statistics


def figures(statistics: Statistics, finish_reason: str) -> Iterator[tuple[str, str]]:
    """Name and value of each figure, beside the tokens a second."""
    counts = f"{statistics.generated_tokens} after a prompt of {statistics.prompt_tokens}"
    yield "tokens", f"{counts} ({finish_reason})"
    if statistics.adopted_tokens:
        yield "adopted", f"{statistics.adopted_tokens} tokens whose KV was there already"
    yield "time to first token", f"{statistics.time_to_first_token * 1000:.0f} ms"
    yield "rounds", f"{statistics.rounds}, {statistics.tokens_per_round:.2f} tokens a round"
    yield "hit rate", _percent(statistics.hit_rate)
    yield "acceptance", _percent(statistics.acceptance_rate)
    if statistics.acceptance_by_depth:
        yield "  by depth", " ".join(f"{share:.0%}" for share in statistics.acceptance_by_depth[:12])
    yield "target busy", _percent(statistics.target_busy)
    unused = f"{_percent(statistics.wasted_draft_share)} of its nodes unused"
    yield "draft busy", f"{_percent(statistics.draft_busy)}, {unused}"
    yield "overhead a round", f"{statistics.overhead_per_round * 1e6:.0f} µs (median)"
    if statistics.pace is not None:
        yield "pace", _pace(statistics.pace)


def speed(statistics: Statistics) -> str:
    return f"{statistics.tokens_per_second:.1f} tokens/s"


def _pace(pace: Pace) -> str:
    """Whether the figures of a run can stand for its profile's device."""
    kept = f"{pace.profile}: {pace.overruns} of {pace.forwards} forwards overran, {pace.stretch:.1%} longer in all"
    return kept if pace.valid else f"{kept}. Invalid: this machine is too slow for the profile, or too busy."


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
