"""A profile as tables in a terminal."""

from collections.abc import Callable, Iterable, Mapping

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from orchestrator.lab.profile.analysis.figures import ProfileFigures, RequestProfile

_TITLES = (
    *("T", "tok/s", "tok/round", "hits", "accepted", "overlapped", "useful", "efficiency"),
    *("T_both", "T_draft", "T_target"),
)
TARGET_WORDS = {
    "verify": "verifies",
    "tidy": "tidies up",
    "prefill": "prefills",
    "for_draft": "awaits growth",
    "for_prefill": "awaits the draft's prefill",
    "for_messages": "awaits messages",
    "for_orchestrator": "awaits the orchestrator",
}
"""What the target's time is spent on."""
DRAFT_WORDS = {
    "used": "hidden and used",
    "discarded": "hidden but discarded",
    "exposed": "exposed",
    "prefill": "prefill",
    "idle": "idle",
}
"""What the draft's time is spent on."""
DEFINITIONS = {
    "overlap efficiency": "(draft alone + target alone - both) / the shorter of the two, within 0 and 1: the share of "
    "the shorter one's work that the other hides (Intel MPI Benchmarks' definition). Alone: the same forwards replayed "
    "in the same process, without the other worker. T_both, T_draft, T_target: those times in ms.",
    "overlapped": "share of the draft's busy time in which the target was busy too.",
    "useful": "share of the draft's busy time in which the target was busy too, in growth steps that published a "
    "token which the target then accepted, or one that led to it ahead of the target.",
    "exposed": "the draft was at work and the target was not.",
}


def tables(profile: ProfileFigures) -> Group:
    """The figures, the use of time by worker, and the definitions."""
    parts: list[RenderableType] = [_figures(profile.requests), ""]
    parts += [_times("target", profile.requests, lambda request: request.target, TARGET_WORDS), ""]
    if any(request.draft_alone or request.overlapped_share is not None for request in profile.requests):
        parts += [_times("draft", profile.requests, lambda request: request.draft, DRAFT_WORDS), ""]
    parts.append(Text("\n".join(remarks(profile)), style="dim"))
    return Group(*parts)


def remarks(profile: ProfileFigures) -> Iterable[str]:
    """What to know about the figures, a sentence or two each."""
    yield f"{profile.strategy}, prompt of {profile.prompt_tokens} tokens. {'; '.join(profile.machine)}."
    if profile.clock_error is not None:
        yield f"Clocks of the processes agree to ±{profile.clock_error * 1e6:.0f} µs."
    yield from profile.notes
    yield from (f"{name}: {meaning}" for name, meaning in DEFINITIONS.items())


def _figures(requests: Iterable[RequestProfile]) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="bold")
    for title in _TITLES:
        table.add_column(title, justify="right")
    for request in requests:
        table.add_row(
            f"{request.temperature:g}",
            f"{request.tokens_per_second:.1f}",
            f"{request.tokens_per_round:.2f}",
            share(request.hit_rate),
            share(request.acceptance_rate),
            share(request.overlapped_share),
            share(request.useful_overlap),
            share(request.overlap_efficiency),
            *(_milliseconds(time) for time in (request.seconds, request.draft_alone, request.target_alone)),
        )
    return table


def _times(
    role: str,
    requests: Iterable[RequestProfile],
    time: Callable[[RequestProfile], Mapping[str, float]],
    words: Mapping[str, str],
) -> Table:
    """A column a temperature: milliseconds and share of the whole."""
    requests = list(requests)
    table = Table(box=None, padding=(0, 1), header_style="bold")
    table.add_column(f"{role}, ms")
    for request in requests:
        table.add_column(f"T = {request.temperature:g}", justify="right")
    for name, word in words.items():
        table.add_row(word, *(_part(time(request), name) for request in requests))
    return table


def _part(times: Mapping[str, float], name: str) -> str:
    whole = sum(times.values())
    return f"{times[name] * 1e3:.1f} {share(times[name] / whole if whole else None):>4}"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.0f}"


def share(value: float | None) -> str:
    """A percentage, or a dash for what does not exist."""
    return "-" if value is None else f"{value:.0%}"
