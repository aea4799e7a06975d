"""The files of a profile, and its HTML page: no scripts, no external resources, light and dark, printable."""

from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from string import Template

import msgspec

from orchestrator.lab.profile.analysis.excerpt import Excerpt, excerpt
from orchestrator.lab.profile.analysis.figures import ProfileFigures, RequestProfile
from orchestrator.lab.profile.analysis.traced_request import traced_requests
from orchestrator.lab.profile.measure import MeasuredRun
from orchestrator.lab.profile.report import svg
from orchestrator.lab.profile.report.perfetto_trace import perfetto_trace
from orchestrator.lab.profile.report.table import DEFINITIONS, DRAFT_WORDS, TARGET_WORDS
from orchestrator.lab.profile.report.timeline import write_timeline
from protocol.errors import InputError

NAMES = ("report.html", "timeline.png", "trace.perfetto-trace", "profile.json")
_COLOURS = {
    **{name: name for name in ("verify", "tidy", "prefill", "used", "discarded", "exposed", "idle", "wait")},
    **{"for_draft": "wait", "for_prefill": "prefill", "for_messages": "travel", "for_orchestrator": "held"},
    **{f"series{index}": f"series{index}" for index in range(5)},
}
"""The colour of each part of a picture."""
_TIMELINE_WORDS = {
    "verify": "target verifies",
    "tidy": "target tidies up",
    "wait": "target awaits growth",
    "used": "growth, used",
    "discarded": "growth, discarded",
    "exposed": "growth while the target is idle",
    "prefill": "prefill",
}


def require_folder(folder: Path) -> None:
    """Make the folder. Raises InputError if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder} can't be made ({error.strerror}): choose another folder for --out.") from error


def write_files(measured: MeasuredRun, folder: Path) -> list[Path]:
    """Write all files of `NAMES`; returns their paths."""
    profile, run = measured.profile, measured.run
    shown = [excerpt(run, request) for request in traced_requests(run)[-len(profile.requests) :]]
    report, picture, trace, figures = (folder / name for name in NAMES)
    report.write_text(page(profile, shown), encoding="utf-8")
    write_timeline(profile, shown, picture)
    trace.write_bytes(perfetto_trace(run))
    figures.write_bytes(msgspec.json.format(msgspec.json.encode(profile)))
    return [report, picture, trace, figures]


def page(profile: ProfileFigures, excerpts: Sequence[Excerpt]) -> str:
    """The whole file. `excerpts`: one a temperature."""
    template = Template((resources.files("orchestrator.lab.profile.report") / "page.html").read_text())
    drafted = any(request.overlapped_share is not None for request in profile.requests)
    sections = [_timelines(excerpts), _times(profile.requests, drafted)]
    if drafted:
        sections.append(_guesses(profile.requests))
    return template.substitute(
        title=f"Where the time of {escape(profile.strategy)} went",
        subtitle=escape(_subtitle(profile)),
        notes="".join(f'<div class="card note">{escape(note)}</div>' for note in profile.notes),
        cards="".join(map(_card, profile.requests)),
        body="".join([*sections, _rounds(profile.requests), _definitions()]),
        colours="\n".join(
            f"rect.{name}, i.{name} {{ fill: var(--{c}); background: var(--{c}); }}" for name, c in _COLOURS.items()
        ),
    )


def _subtitle(profile: ProfileFigures) -> str:
    clocks = "" if profile.clock_error is None else f" Clocks agree to ±{profile.clock_error * 1e6:.0f} µs."
    return f"Prompt of {profile.prompt_tokens} tokens. {', '.join(profile.machine)}.{clocks}"


def _card(request: RequestProfile) -> str:
    meters = {
        "overlap efficiency": request.overlap_efficiency,
        "overlapped share": request.overlapped_share,
        "useful overlap": request.useful_overlap,
        "hit rate": request.hit_rate,
        "acceptance": request.acceptance_rate,
    }
    bars = "".join(_meter(name, value) for name, value in meters.items() if value is not None)
    speed = f"{request.tokens_per_second:.1f} <small>tokens/s at T = {request.temperature:g}</small>"
    line = f"{request.tokens} tokens, {len(request.rounds)} rounds, {request.tokens_per_round:.2f} tokens a round"
    return f'<div class="card"><div class="speed">{speed}</div><p class="faint">{line}</p>{bars}</div>'


def _meter(name: str, value: float) -> str:
    bar = f'<i><b style="width:{value:.1%}"></b></i>'
    return f'<div class="meter"><span class="faint">{name}</span>{bar}<span>{value:.0%}</span></div>'


def _timelines(excerpts: Sequence[Excerpt]) -> str:
    cards = "".join(
        f'<div class="card"><p>Temperature {each.temperature:g}, rounds {each.first} to {each.first + each.count - 1}'
        f"</p>{svg.timeline(each)}</div>"
        for each in excerpts
    )
    looks = {bar.look for each in excerpts for bar in (*each.draft, *each.target)}
    legend = _legend({name: word for name, word in _TIMELINE_WORDS.items() if name in looks})
    text = "Some rounds from the middle. A line leads from a growth step to the verdict that accepted a token of it."
    return f'<h2>Timeline</h2><p class="faint">{text}</p>{legend}{cards}'


def _times(requests: Sequence[RequestProfile], drafted: bool) -> str:
    target = [(f"T = {request.temperature:g}", request.target) for request in requests]
    parts = [_share_card("Where the target's time went", target, TARGET_WORDS)]
    if drafted:
        draft = [(f"T = {request.temperature:g}", request.draft) for request in requests]
        parts.append(_share_card("Where the draft's time went", draft, DRAFT_WORDS))
    return "".join(parts)


def _share_card(title: str, rows: Sequence[tuple[str, Mapping[str, float]]], words: Mapping[str, str]) -> str:
    there = {name: word for name, word in words.items() if any(times[name] > 0 for _, times in rows)}
    return f'<h2>{title}</h2><div class="card">{svg.shares(rows, there)}{_legend(there)}</div>'


def _guesses(requests: Sequence[RequestProfile]) -> str:
    names = [f"T = {request.temperature:g}" for request in requests]
    deepest = min(12, max((len(request.acceptance_by_depth) for request in requests), default=0))
    depths = [(str(d + 1), [_at(request.acceptance_by_depth, d) for request in requests]) for d in range(deepest)]
    hits = [(name, [request.hit_rate]) for name, request in zip(names, requests, strict=True)]
    legend = _legend({f"series{index}": name for index, name in enumerate(names)})
    return (
        '<div class="row"><div><h2>Acceptance by depth below the root</h2><div class="card">'
        f"{svg.columns(depths, names, 'Acceptance by depth')}{legend}</div></div>"
        '<div><h2>Hit rate by temperature</h2><div class="card">'
        f"{svg.columns(hits, ['hit rate'], 'Hit rate by temperature')}</div></div></div>"
    )


def _rounds(requests: Sequence[RequestProfile]) -> str:
    return "<h2>Rounds</h2>" + "".join(map(_round_table, requests))


def _round_table(request: RequestProfile) -> str:
    titles = (
        "round",
        "at, ms",
        "nodes",
        "accepted",
        "next",
        "verify, ms",
        "idle before, ms",
        "of it growth",
        "steps",
        "used",
    )
    head = "".join(f"<th>{title}</th>" for title in titles)
    rows = "".join(
        f"<tr><td>{each.round}</td><td>{each.began * 1e3:.1f}</td><td>{each.nodes}</td><td>{each.accepted}</td>"
        f"{_hit(each.hit)}<td>{each.verify * 1e3:.2f}</td><td>{sum(each.idle_before.values()) * 1e3:.2f}</td>"
        f"<td>{each.idle_before['draft'] * 1e3:.2f}</td><td>{each.steps}</td><td>{each.used_steps}</td></tr>"
        for each in request.rounds
    )
    summary = f"Temperature {request.temperature:g}: {len(request.rounds)} rounds"
    return f'<details class="card"><summary>{summary}</summary><table><tr>{head}</tr>{rows}</table></details>'


def _hit(hit: bool | None) -> str:
    return {True: "<td>hit</td>", False: '<td class="miss">miss</td>', None: "<td>-</td>"}[hit]


def _definitions() -> str:
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(meaning)}</dd>" for name, meaning in DEFINITIONS.items())
    return f"<h2>Definitions</h2><dl>{items}</dl>"


def _legend(words: Mapping[str, str]) -> str:
    items = "".join(f'<span><i class="{name}"></i>{escape(word)}</span>' for name, word in words.items())
    return f'<div class="legend">{items}</div>'


def _at(values: Sequence[float], index: int) -> float | None:
    return values[index] if index < len(values) else None
