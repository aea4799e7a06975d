"""A bench's output: tables with footnotes, one JSON object, a progress bar on stderr."""

import importlib.metadata
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, Self

import msgspec
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from orchestrator.machine import hardware as machine_facts
from orchestrator.machine.device_profiles import DeviceProfile, load_profile
from orchestrator.tools.bench.figures import BenchRow
from orchestrator.tools.bench.trials import WARM_UP_TOKENS, BenchPlan

_NARROWEST = 128
"""Characters a table needs."""
_TITLES = (
    *("tok/s", "min..max", "/plain", "/spec", "/ar", "tok/round", "hits", "accepted"),
    *("target", "draft", "µs", "exact"),
)
_FOOTNOTE = f"""\
tok/s: generated tokens, the first included, divided by the seconds until the last token. The clock starts when the \
target holds the KV of all prompt tokens but the last. Median over prompts and repeats; min..max of the same.
/plain, /spec, /ar: ratio to mlx-lm's generate_step, to its speculative_generate_step with the best K at this \
temperature, and to our ar; median over pairs of the same prompt and repeat.
hits: share of rounds whose new root had children in the token tree. target, draft: share of the time at work. µs: \
time of a round beyond the target's forward. Medians.
exact: at temperature 0 every token equals mlx-lm's plain decoding; above it, that of our first strategy. rejection: \
tokens have the target's distribution, and no reference.
One contender computes at a time. Before the measurement each generated {WARM_UP_TOKENS} tokens at each temperature. \
mlx-lm runs on the target's cores; our draft has cores of its own. Every prompt is prefilled: pipelines keep no KV."""

_REPLAYED = """
Replayed: the target's texts were recorded once by its own decoding. No contender ran the target's model; exact means \
equal to the recorded text."""


def tables(rows: Sequence[BenchRow], plan: BenchPlan, prompts: int) -> Group:
    """One table a temperature, then the settings, the machine and the definitions."""
    parts: list[RenderableType] = []
    for temperature in dict.fromkeys(row.temperature for row in rows):
        parts += [_table(temperature, [row for row in rows if row.temperature == temperature]), ""]
    scope = f"{prompts} prompts, {plan.max_tokens} tokens, {plan.repeats} repeats"
    pace = _pace_note(load_profile(plan.pace)) if plan.pace else ""
    pace += _REPLAYED if plan.replays else ""
    parts.append(Text(f"{scope}. {'. '.join(machine_lines())}.\n{_FOOTNOTE}{pace}", style="dim"))
    return Group(*parts)


def wide_console() -> Console:
    """Standard output; a file or pipe is as wide as a table needs."""
    console = Console()
    return console if console.is_terminal else Console(width=max(_NARROWEST, console.width))


def to_json(rows: Sequence[BenchRow], plan: BenchPlan, prompts: int) -> dict[str, Any]:
    """The machine, the settings, whether all rows are exact and representative, and the rows."""
    return {
        "machine": machine_lines(),
        "settings": {**msgspec.to_builtins(asdict(plan)), "prompts": prompts},
        "exact": all(row.exact for row in rows),
        "representative": all(row.representative for row in rows),
        "results": [asdict(row) for row in rows],
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
    shares = machine_facts.partition_cores()
    cores = f"cores of the target {len(shares['target'])}, of the draft {len(shares['draft'])}" if shares else ""
    blas = f"BLAS {machine_facts.openblas() or 'as MLX ships it'}" if shares else ""
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


def _table(temperature: float, rows: Sequence[BenchRow]) -> Table:
    table = Table(title=f"temperature {temperature:g}", title_justify="left", box=None, padding=(0, 1, 0, 0))
    table.add_column("contender", no_wrap=True)
    paced = any(row.overruns is not None for row in rows)
    for title in (*_TITLES, "overran", "longer") if paced else _TITLES:
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        cells = (*_cells(row), _share(row.overruns, 1), _share(row.stretch, 1)) if paced else _cells(row)
        table.add_row(row.contender, *cells, style="" if row.exact and row.representative else "red")
    return table


def _cells(row: BenchRow) -> Iterator[str]:
    if not row.exact:
        yield "WRONG"
        yield from [""] * (len(_TITLES) - 2)
        yield f"{row.checked - row.deviating}/{row.checked}"
        return
    yield f"{row.tokens_per_second:.1f}"
    yield f"{row.slowest:.0f}..{row.fastest:.0f}"
    yield from (_ratio(ratio) for ratio in (row.over_plain, row.over_speculative, row.over_autoregressive))
    yield "-" if row.tokens_per_round is None else f"{row.tokens_per_round:.2f}"
    yield from (_share(s) for s in (row.hit_rate, row.acceptance_rate, row.target_busy, row.draft_busy))
    yield "-" if row.overhead_per_round is None else f"{row.overhead_per_round * 1e6:.0f}"
    yield "yes" if row.checked else "rejection" if row.rejection else "-"


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def _share(share: float | None, decimals: int = 0) -> str:
    return "-" if share is None else f"{share:.{decimals}%}"


def _pace_note(profile: DeviceProfile) -> str:
    return f"""
Paced as {profile.name} ({profile.description}). mlx-lm: target and draft on the target's device, one after the \
other. Ours: the draft on a device of its own; every forward takes {profile.both_busy.factor:g} times as long under \
strategies whose draft and target overlap. overran: share of forwards that took longer here than on that device; more \
than 1% is invalid. longer: time of all forwards beyond the device's, late wake-ups included. Prefill is not timed."""
