"""A bench's output: tables with footnotes, one JSON object, a progress bar on stderr."""

import importlib.metadata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple, Self

import msgspec
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from orchestrator.lab.bench.names import LLAMA_CPP
from orchestrator.lab.bench.plan import BenchPlan
from orchestrator.lab.bench.results.figures import BenchRow, best_of_each_line
from orchestrator.lab.bench.results.intervals import FEWEST_PROMPTS, Interval, Ratio
from orchestrator.lab.bench.trials import WARM_UP_TOKENS
from orchestrator.machine import hardware as machine_facts
from orchestrator.machine.blas.library import fast_blas
from orchestrator.machine.placement import usual_cores
from orchestrator.machine.profiles.device_profiles import DeviceProfile, load_profile

_NARROWEST = 128
"""Characters a table needs."""
_LARGE = 20.0
"""Tokens/s without decimals."""
_DEFINITIONS = f"""\
A figure is the median over prompts, turns and repeats; tok/s and the ratio take each prompt's own median first.
The table has the fastest of the contenders that differ only in K; --json has all, each with its ratios to mlx-lm's \
plain decoding, to its speculative decoding and to our ar, p50 and total times.
One contender computes at a time. Before the measurement each generated {WARM_UP_TOKENS} tokens at each temperature. \
mlx-lm runs on all cores, and as a control on the target's; our draft has cores of its own. Every prompt is \
prefilled: pipelines keep no KV. A later turn stands behind the target's own answers at temperature 0.
lookup: adaptive with the n-gram draft. random draft: adaptive with a draft that guesses blindly at the same cost."""

_RIVAL_NOTES = {
    "mlx-dspark": """
mlx-dspark: its own greedy_generate and lookup_generate with the same weights, on all cores, on a processor in \
float32. K is its max_draft_tokens; bigrams: its ngram_min is 2 instead of 3. Its seconds are by its own clock, from \
the same moment as everyone's.""",
    LLAMA_CPP: """
llama.cpp: its own server with the GGUF file of the same weights, on all cores. It computes with packed weights, so \
its texts differ and are not compared. Its seconds are by its own clock, from the same moment as everyone's.""",
}

_SLOW_MOTION = """
Everything ran {:g} times slower. The figures are in the time of the device, with the whole overhead of our rounds; \
what else Python does between forwards, here and in mlx-lm, counts only in part."""
_REPLAYED = """
Replayed: the target's texts were recorded once by its own decoding. No contender ran the target's model; exact means \
equal to the recorded text."""


def tables(
    rows: Sequence[BenchRow],
    plan: BenchPlan,
    prompts: int,
    by_category: Mapping[str, Sequence[BenchRow]] | None = None,
    absent: Mapping[str, str] | None = None,
) -> Group:
    """Two tables a temperature (figures; ratios by category), then the settings, the machine and the definitions.

    `by_category` has the rows of each category's prompts; the second table needs at least two categories. `absent` has
    the rivals that can't run, each with the reason.
    """
    parts: list[RenderableType] = []
    for temperature in dict.fromkeys(row.temperature for row in rows):
        shown = best_of_each_line([row for row in rows if row.temperature == temperature])
        parts += [_table(temperature, shown), ""]
        if by_category and len(by_category) > 1:
            parts += [_category_table(shown, by_category), ""]
    parts += [Text(sentence) for sentence in (*_absences(absent or {}), *_rival_deviations(rows))]
    scope = f"{prompts} prompts, {plan.max_tokens} tokens, {plan.repeats} repeats"
    pace = _pace_note(load_profile(plan.pace)) if plan.pace else ""
    rivals = "".join(note for name, note in _RIVAL_NOTES.items() if any(_of_rival(row, name) for row in rows))
    replayed = _REPLAYED if plan.replays else ""
    columns = " ".join(f"{column.title}: {column.meaning}." for column in _shown_columns(rows) if column.meaning)
    notes = f"{columns}\n{_DEFINITIONS}{rivals}{pace}{replayed}"
    parts.append(Text(f"{scope}. {'. '.join(machine_lines())}.\n{notes}", style="dim"))
    return Group(*parts)


def wide_console() -> Console:
    """Standard output; a file or pipe is as wide as a table needs."""
    console = Console()
    return console if console.is_terminal else Console(width=max(_NARROWEST, console.width))


def to_json(
    rows: Sequence[BenchRow],
    plan: BenchPlan,
    prompts: int,
    by_category: Mapping[str, Sequence[BenchRow]] | None = None,
    absent: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The machine, the settings, whether all rows are exact and representative, the rows, and why rivals are absent."""
    return {
        "machine": machine_lines(),
        "settings": {**msgspec.to_builtins(asdict(plan)), "prompts": prompts},
        "exact": all(row.exact for row in rows),
        "representative": all(row.representative for row in rows),
        "results": [_values(row) for row in rows],
        "by_category": {name: [_values(row) for row in group] for name, group in (by_category or {}).items()},
        "absent_rivals": dict(absent or {}),
    }


def failures(rows: Sequence[BenchRow]) -> list[str]:
    """A sentence for each contender whose tokens are wrong."""
    return [
        f"{row.contender} at temperature {row.temperature:g}: {row.deviating} of {row.checked} generations "
        "differ from the reference."
        for row in rows
        if not row.exact
    ]


def invalid(rows: Sequence[BenchRow]) -> list[str]:
    """A sentence for each contender that did not keep its pace."""
    return [
        f"{row.contender} at temperature {row.temperature:g} is invalid: {row.overruns:.1%} of its forwards took "
        "longer than the profile's device would. Use a faster or quieter machine, or a slower profile."
        for row in rows
        if not row.representative
    ]


def machine_lines() -> list[str]:
    """The hardware and libraries that the figures depend on."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("mlx", "mlx-lm"))
    shares = usual_cores()
    cores = f"cores of the target {len(shares['target'])}, of the draft {len(shares['draft'])}" if shares else ""
    blas = f"BLAS {fast_blas() or 'as MLX ships it'}" if shares else ""
    return [line for line in (machine_facts.chip(), versions, cores, blas) if line]


class BenchProgress:
    """Shows which contender computes and how many of `generations` are done. A context."""

    def __init__(self, generations: int) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        # Redrawn rarely: the bar must not compute while contenders are measured.
        self._progress = Progress(*columns, console=Console(stderr=True), refresh_per_second=2)
        self._task = self._progress.add_task("Starting", total=generations)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def set_total(self, generations: int) -> None:
        """Correct the number of generations."""
        self._progress.update(self._task, total=generations)

    def starting(self, contender: str) -> None:
        self._progress.update(self._task, description=f"Starting {contender}")

    def finished(self, contender: str) -> None:
        """Count one generation of this contender."""
        self._progress.update(self._task, description=contender, advance=1)


def _absences(absent: Mapping[str, str]) -> list[str]:
    return [f"{name} is not in the table: {reason}." for name, reason in absent.items()]


def _rival_deviations(rows: Sequence[BenchRow]) -> list[str]:
    return [
        f"{row.contender} at temperature {row.temperature:g}: {row.deviating} of {row.checked} generations differ from "
        "the reference. Its numerics can break ties otherwise, so this is no failure of the bench."
        for row in rows
        if row.rival and row.deviating
    ]


def _values(row: BenchRow) -> dict[str, Any]:
    """A row as JSON values; an interval has its bounds by name."""
    ratios = {baseline: _ratio_values(ratio) for baseline, ratio in row.ratios.items()}
    best = row.over_best and _ratio_values(row.over_best)
    return {**asdict(row), "quartiles": row.quartiles._asdict(), "over_best": best, "ratios": ratios}


def _ratio_values(ratio: Ratio) -> dict[str, Any]:
    return {"median": ratio.median, "interval": ratio.interval and ratio.interval._asdict()}


def _of_rival(row: BenchRow, name: str) -> bool:
    return row.rival and row.contender.startswith(name)


def _table(temperature: float, rows: Sequence[BenchRow]) -> Table:
    best = next((row.best_baseline for row in rows if row.best_baseline), None)
    title = f"temperature {temperature:g}" + (f", mlx-lm at its best: {best}" if best else "")
    columns = _shown_columns(rows)
    table = _bare_table(title, "contender", [column.title for column in columns])
    for row in rows:
        cells = ((column.cell if row.exact else column.wrong)(row) for column in columns)
        table.add_row(row.contender, *cells, style="" if row.valid else "red")
    return table


def _shown_columns(rows: Sequence[BenchRow]) -> "list[_Column]":
    paced = any(row.overruns is not None for row in rows)
    return [column for column in _COLUMNS if column.paced in (None, paced)]


def _category_table(rows: Sequence[BenchRow], by_category: Mapping[str, Sequence[BenchRow]]) -> Table:
    """The ratio to mlx-lm at its best on the prompts of each category."""
    table = _bare_table("/mlx-lm by category", "", (row.contender for row in rows), wrapped=True)
    for category, group in (*by_category.items(), ("all", rows)):
        found = [next((one for one in group if _same(one, row) and one.exact), None) for row in rows]
        table.add_row(category, *(_median_ratio(one and one.over_best) for one in found))
    return table


def _same(one: BenchRow, other: BenchRow) -> bool:
    return (one.contender, one.temperature) == (other.contender, other.temperature)


def _bare_table(title: str, first: str, columns: Iterable[str], wrapped: bool = False) -> Table:
    """`wrapped`: long titles of columns may take several lines."""
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=not wrapped)
    return table


def _compared(row: BenchRow) -> str:
    """Whether its tokens are the reference's."""
    if row.deviating:
        return f"{row.checked - row.deviating}/{row.checked}"
    return "yes" if row.checked else "rej" if row.rejection else "-"


def _interval(interval: Interval | None, decimals: int = 2) -> str:
    return "-" if interval is None else f"{interval.low:.{decimals}f}..{interval.high:.{decimals}f}"


def _median_ratio(ratio: Ratio | None) -> str:
    return _ratio(ratio and ratio.median)


def _scaled(seconds: float | None, units: float) -> str:
    return "-" if seconds is None else f"{seconds * units:.0f}"


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def _share(share: float | None, decimals: int = 0) -> str:
    return "-" if share is None else f"{share:.{decimals}%}"


def _pace_note(profile: DeviceProfile) -> str:
    slow = "" if profile.slow_motion == 1.0 else _SLOW_MOTION.format(profile.slow_motion)
    return f"""
Paced as {profile.name} ({profile.description}). mlx-lm: target and draft on the target's device, one after the \
other. Ours: the draft on a device of its own; every forward takes {profile.both_busy.factor:g} times as long under \
strategies whose draft and target overlap. mlx-lm's prefill is not paced, so there are no times to the first token to \
compare.{slow}"""


class _Column(NamedTuple):
    """A column of the table: all that there is to say about it."""

    title: str
    cell: Callable[[BenchRow], str]
    meaning: str = ""
    """For the lines below the table; empty if a column before explains it."""
    paced: bool | None = None
    """Only in paced runs, or only in others; None: in all."""
    wrong: Callable[[BenchRow], str] = lambda _: ""
    """The cell of a contender whose tokens are wrong."""


_COLUMNS = (
    _Column(
        "tok/s",
        lambda row: f"{row.tokens_per_second:.1f}",
        "generated tokens, the first included, divided by the seconds until the last token; the clock starts when the "
        "target holds the KV of all prompt tokens but the last",
        wrong=lambda _: "WRONG",
    ),
    _Column(
        "quartiles",
        lambda row: _interval(row.quartiles, 0 if row.quartiles.high >= _LARGE else 1),
        "of tok/s, over prompts",
    ),
    _Column(
        "/mlx-lm",
        lambda row: _median_ratio(row.over_best),
        "ratio to mlx-lm at its best, which the title names: on all cores, plain or speculative with our draft and the "
        "best K, whichever has the highest median here; taken between generations of the same prompt, turn and repeat",
    ),
    _Column(
        "95%",
        lambda row: _interval(row.over_best and row.over_best.interval) if row.contender != row.best_baseline else "",
        f"bootstrap interval of /mlx-lm, which resamples the prompts and needs at least {FEWEST_PROMPTS} of them",
    ),
    _Column("tok/rd", lambda row: _ratio(row.tokens_per_round), "tokens a round"),
    _Column(
        "hits",
        lambda row: _share(row.hit_rate),
        "share of rounds whose new root had children in the token tree",
    ),
    _Column(
        "accept",
        lambda row: _share(row.acceptance_rate),
        "share of verified draft tokens that were accepted",
    ),
    _Column(
        "first",
        lambda row: _scaled(row.time_to_first_token, 1e3),
        "ms from the request to the first token at the client, prefill included",
        paced=False,
    ),
    _Column(
        "p95",
        lambda row: _scaled(row.inter_token_p95, 1e3),
        "95% of the gaps between successive arrivals at the client are shorter, ms; tokens of a round arrive at once",
    ),
    _Column("busy", lambda row: _share(row.target_busy), "share of the time that the target works"),
    _Column("µs", lambda row: _scaled(row.overhead_per_round, 1e6), "time of a round beyond the target's forward"),
    _Column(
        "exact",
        _compared,
        "at temperature 0 every token equals mlx-lm's plain decoding; above it, that of our first strategy; rej is "
        "rejection sampling, whose tokens have the target's distribution and no reference",
        wrong=_compared,
    ),
    _Column(
        "overran",
        lambda row: _share(row.overruns, 1),
        "share of forwards that took longer here than on the profile's device; more than 1% is invalid",
        paced=True,
    ),
)
