"""The figures of one generation as names and words: its speed, and how the speculation went. Pure."""

from collections.abc import Iterator

from protocol.messages.client import Pace, Statistics


def figures(statistics: Statistics, finish_reason: str) -> Iterator[tuple[str, str]]:
    """Name and value of each figure that exists, beside the tokens a second."""
    yield "tokens", counts(statistics, finish_reason)
    if statistics.adopted_tokens:
        yield "adopted", f"{statistics.adopted_tokens} tokens whose KV was there already"
    yield "time to first token", f"{statistics.time_to_first_token * 1000:.0f} ms"
    yield "rounds", f"{statistics.rounds}, {statistics.tokens_per_round:.2f} tokens a round"
    if statistics.hit_rate is not None:
        yield "hit rate", f"{statistics.hit_rate:.0%}"
    if statistics.acceptance_rate is not None:
        yield "acceptance", f"{statistics.acceptance_rate:.0%}"
    if statistics.acceptance_by_depth:
        yield "  by depth", " ".join(f"{share:.0%}" for share in statistics.acceptance_by_depth[:12])
    yield "target busy", f"{statistics.target_busy:.0%}"
    if statistics.wasted_draft_share is not None:
        yield "draft busy", f"{statistics.draft_busy:.0%}, {statistics.wasted_draft_share:.0%} of its nodes unused"
    yield "overhead a round", f"{statistics.overhead_per_round * 1e6:.0f} µs (median)"
    yield from conclusion(statistics)


def conclusion(statistics: Statistics) -> Iterator[tuple[str, str]]:
    """Whether the figures can stand for a device, and what speculation gained."""
    if statistics.pace is not None:
        yield "pace", _pace(statistics.pace)
    speedup, plain = statistics.speedup, statistics.plain_tokens_per_second
    if speedup is not None:
        yield "speed-up", f"about {speedup:.1f} times plain decoding (about {plain:.1f} tokens/s, estimated)"


def counts(statistics: Statistics, finish_reason: str) -> str:
    return f"{statistics.generated_tokens} after a prompt of {statistics.prompt_tokens} ({finish_reason})"


def speed(statistics: Statistics) -> str:
    return f"{statistics.tokens_per_second:.1f} tokens/s"


def _pace(pace: Pace) -> str:
    """Whether the figures of a run can stand for its profile's device."""
    kept = f"{pace.profile}: {pace.overruns} of {pace.forwards} forwards overran, {pace.stretch:.1%} longer in all"
    return kept if pace.valid else f"{kept}. Invalid: this machine is too slow for the profile, or too busy."
