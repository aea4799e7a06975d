"""A profile's findings and files: tables, a page, a timeline, a Perfetto trace, the figures as JSON."""

from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from orchestrator.lab import report
from orchestrator.lab.findings import Cell, Column, Field, Findings, Table, tabulated
from orchestrator.lab.profile.analysis.excerpt import excerpt
from orchestrator.lab.profile.analysis.figures import ProfileFigures, RequestProfile, RoundRecord
from orchestrator.lab.profile.analysis.overlap import traced_requests
from orchestrator.lab.profile.measure import MeasuredRun
from orchestrator.lab.profile.perfetto_trace import perfetto_trace
from orchestrator.lab.profile.timeline import DRAFT_WORDS, write_timeline
from protocol.errors import InputError

NAMES = ("report.html", "timeline.png", "trace.perfetto-trace", "profile.json")
_TARGET_WORDS = {
    "verify": "verifies",
    "tidy": "tidies up",
    "prefill": "prefills",
    "for_draft": "awaits growth",
    "for_prefill": "awaits the draft's prefill",
    "for_messages": "awaits messages",
    "for_orchestrator": "awaits the orchestrator",
}
"""What the target's time is spent on."""
_EFFICIENCY = (
    "(draft alone + target alone - both) / the shorter of the two, within 0 and 1: the share of the shorter one's work "
    "that the other hides (Intel MPI Benchmarks' definition). Alone: the same forwards replayed in the same process, "
    "without the other worker. T_both, T_draft, T_target: those times in ms"
)
_EXPOSED = "exposed: the draft was at work and the target was not."
_FIELDS: tuple[Field[RequestProfile], ...] = (
    Field("T", lambda each: each.temperature, "g"),
    Field("tok/s", lambda each: each.tokens_per_second, ".1f"),
    Field("tok/round", lambda each: each.tokens_per_round, ".2f"),
    Field("hits", lambda each: each.hit_rate, ".0%"),
    Field("accepted", lambda each: each.acceptance_rate, ".0%"),
    Field(
        "overlapped",
        lambda each: each.overlapped_share,
        ".0%",
        "share of the draft's busy time in which the target was busy too",
    ),
    Field(
        "useful",
        lambda each: each.useful_overlap,
        ".0%",
        "share of the draft's busy time in which the target was busy too, in growth steps that published a token which "
        "the target then accepted, or one that led to it ahead of the target",
    ),
    Field("efficiency", lambda each: each.overlap_efficiency, ".0%", _EFFICIENCY),
    Field("T_both", lambda each: each.seconds, ".0f", scale=1e3),
    Field("T_draft", lambda each: each.draft_alone, ".0f", scale=1e3),
    Field("T_target", lambda each: each.target_alone, ".0f", scale=1e3),
)
_HITS = {True: "hit", False: "miss", None: "-"}
_ROUND_FIELDS: tuple[Field[RoundRecord], ...] = (
    Field("round", lambda each: str(each.round)),
    Field("at, ms", lambda each: each.began, ".1f", scale=1e3),
    Field("nodes", lambda each: each.nodes),
    Field("accepted", lambda each: each.accepted),
    Field("next", lambda each: _HITS[each.hit]),
    Field("verify, ms", lambda each: each.verify, ".2f", scale=1e3),
    Field("idle before, ms", lambda each: sum(each.idle_before.values()), ".2f", scale=1e3),
    Field("of it growth", lambda each: each.idle_before["draft"], ".2f", scale=1e3),
    Field("steps", lambda each: each.steps),
    Field("used", lambda each: each.used_steps),
)


def findings(profile: ProfileFigures) -> Findings:
    """The figures, and the use of time by worker."""
    drafted = any(each.draft_alone or each.overlapped_share is not None for each in profile.requests)
    tables = [tabulated("", _FIELDS, profile.requests)]
    tables.append(_times("target", profile.requests, lambda each: each.target, _TARGET_WORDS))
    tables += [_times("draft", profile.requests, lambda each: each.draft, DRAFT_WORDS)] if drafted else []
    return Findings(
        title=f"Where the time of {profile.strategy} went",
        conditions=tuple(_conditions(profile)),
        tables=tuple(tables),
        notes=(*profile.notes, _EXPOSED),
        figures=msgspec.to_builtins(profile),
    )


def _conditions(profile: ProfileFigures) -> Iterator[str]:
    yield f"{profile.strategy}, prompt of {profile.prompt_tokens} tokens. {'; '.join(profile.machine)}."
    if profile.clock_error is not None:
        yield f"Clocks of the processes agree to ±{profile.clock_error * 1e6:.0f} µs."


def _times(
    role: str,
    requests: Sequence[RequestProfile],
    time: Callable[[RequestProfile], Mapping[str, float]],
    words: Mapping[str, str],
) -> Table:
    """Two columns a temperature: milliseconds, and the share of the whole."""
    columns = [Column(f"{role}, ms")]
    for each in requests:
        columns += [Column(f"T = {each.temperature:g}", ".1f"), Column("", ".0%")]
    rows: list[tuple[Cell, ...]] = []
    for name, word in words.items():
        row: list[Cell] = [word]
        for each in requests:
            whole = sum(time(each).values())
            row += [1e3 * time(each)[name], time(each)[name] / whole if whole else None]
        rows.append(tuple(row))
    return Table("", tuple(columns), tuple(rows))


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
    page, picture, trace, figures = (folder / name for name in NAMES)
    write_timeline(profile, shown, picture)
    page.write_text(_page(profile, picture.read_bytes()), encoding="utf-8")
    trace.write_bytes(perfetto_trace(run))
    figures.write_bytes(msgspec.json.format(msgspec.json.encode(profile)))
    return [page, picture, trace, figures]


def _page(profile: ProfileFigures, picture: bytes) -> str:
    """The whole file: the picture, the tables, and every round."""
    found = findings(profile)
    rounds = Findings(
        tables=tuple(
            tabulated(f"Temperature {each.temperature:g}: {len(each.rounds)} rounds", _ROUND_FIELDS, each.rounds)
            for each in profile.requests
        )
    )
    timeline = f'<img alt="Timelines" width="100%" src="data:image/png;base64,{b64encode(picture).decode()}">'
    return report.page(found.title, (), f"{timeline}{report.section(found)}<h2>Rounds</h2>{report.section(rounds)}")
