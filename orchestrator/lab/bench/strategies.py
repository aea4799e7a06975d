"""Our strategies beside mlx-lm's own decoding and other software: the measurement from its requests to its findings."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from orchestrator.api.pipeline import Pipeline
from orchestrator.lab.bench.columns import COLUMNS
from orchestrator.lab.bench.contender import (
    BenchRequest,
    Deviation,
    GenerationTask,
    Measurement,
    deviating,
    settings,
)
from orchestrator.lab.bench.figures import (
    FIGURES,
    NO_TIES,
    BenchRow,
    Parts,
    Ratio,
    Ties,
    best_of_each_line,
    parts,
    rows,
    rows_by_category,
)
from orchestrator.lab.bench.plan import BenchPlan
from orchestrator.lab.bench.prompts import BenchPrompt
from orchestrator.lab.bench.trials import Start, requests_of, run, starts
from orchestrator.lab.findings import Cell, Column, Findings, Listener, Table, tabulated
from orchestrator.lab.forwards import TIE, ForwardOrder, Gap, examined, parting
from orchestrator.lab.report import machine_lines
from orchestrator.machine.cache_entries import made_once
from orchestrator.machine.check import Check
from orchestrator.machine.hardware import computes_on_gpu
from orchestrator.machine.profiles.device_profiles import DeviceProfile, load_profile
from protocol.contracts.engines import NO_DRAFT
from protocol.contracts.model_folder import ModelFolder
from protocol.errors import InputError
from protocol.paths import cache_folder
from protocol.worker.recorded_texts import RecordedTarget, RecordedText, RecordedTexts


def measure(plan: BenchPlan, prompts: Sequence[BenchPrompt], watch: Listener) -> Findings:
    """Raises InputError or PipelineError for what can't be measured."""
    if plan.replays and plan.models().trained:
        raise InputError(
            "A trained drafter reads the target's hidden states, which recorded texts do not hold: leave out --replay."
        )
    requests = requests_of(prompts, plan, watch)
    texts = None
    if plan.replays:
        watch.begin(len(distinct_tasks(plan, requests)), "the target, to record its texts")
        texts = recorded(plan, requests, watch.finished)
    absent: dict[str, str] = {}
    start = starts(plan, requests[0].tokens, watch) if plan.pace is None else {}
    watch.begin(1, "the contenders")
    measurements, names = run(plan, requests, watch, absent.__setitem__, texts)
    ties = NO_TIES if texts is not None else _ties(plan, requests, measurements, names, watch)
    by_category = rows_by_category(measurements, names, ties)
    return findings(rows(measurements, names, ties), plan, len(prompts), by_category, absent, start)


def _ties(
    plan: BenchPlan,
    requests: Sequence[BenchRequest],
    measurements: Sequence[Measurement],
    names: Sequence[str],
    watch: Listener,
) -> Ties:
    """None on a processor, which gives the same logits at every width."""
    deviations = deviating(measurements, names)
    if not deviations or not computes_on_gpu():
        return NO_TIES
    watch.begin(1, "the target, to examine where texts part")
    prompts = {(request.prompt, request.turn): request.tokens for request in requests}
    found = gaps(plan.models().target, deviations, prompts)
    return {
        (wrong.setting, wrong.contender): gap for (wrong, _), gap in zip(deviations, found, strict=True) if gap < TIE
    }


def gaps(
    folder: Path, deviations: Sequence[Deviation], prompts: Mapping[tuple[int, int], Sequence[int]]
) -> list[float]:
    """The gap of each deviation, by a forward of the model over one token. `prompts`: by prompt and turn.

    Raises PipelineError if the process fails.
    """
    partings = tuple(
        parting(
            prompts[wrong.setting.prompt, wrong.setting.turn],
            wrong.generation.tokens,
            reference.generation.tokens,
            wrong.setting.temperature,
            wrong.setting.seed,
        )
        for wrong, reference in deviations
    )
    order = ForwardOrder(folder=str(folder), partings=partings)
    return [one.gap for one in examined(order) if isinstance(one, Gap)]


# Tables ----------------------------------------------------------------------------------------------


def findings(
    rows: Sequence[BenchRow],
    plan: BenchPlan,
    prompts: int,
    by_category: Mapping[str, Sequence[BenchRow]] | None = None,
    absent: Mapping[str, str] | None = None,
    start: Mapping[str, Start] | None = None,
) -> Findings:
    """Tables of each temperature: figures, ratios by category, of which there must be two at least, and what the parts
    of `adaptive` give.

    `by_category` has the rows of each category's prompts; `absent` the rivals that can't run, each with the reason;
    `start` of each of ours and mlx-lm's, by name.
    """
    temperatures = list(dict.fromkeys(row.temperature for row in rows))
    several = by_category if by_category and len(by_category) > 1 else {}
    shares = list(parts(rows, several))
    tables: list[Table] = []
    for temperature in temperatures:
        here = best_of_each_line([row for row in rows if row.temperature == temperature])
        tables.append(figures_table(here))
        if several:
            tables.append(_category_table(here, several))
        if found := [each for each in shares if each.temperature == temperature]:
            tables.append(_parts_table(found, [row.contender for row in here]))
    if start:
        tables.append(_start_table(start))
    return Findings(
        title=f"{plan.pace or 'this machine'}, {prompts} prompts, {plan.max_tokens} tokens",
        conditions=(f"{prompts} prompts, {plan.max_tokens} tokens, {plan.repeats} repeats.", *machine_lines()),
        tables=tuple(tables),
        checks=tuple(_checks(rows)),
        notes=tuple(_notes(rows, plan, absent or {})),
        figures={
            "machine": machine_lines(),
            "settings": {**asdict(plan), "prompts": prompts},
            "exact": all(row.exact for row in rows),
            "representative": all(row.representative for row in rows),
            "results": [_values(row) for row in rows],
            "parts": [each._asdict() for each in shares],
            "by_category": {name: [_values(row) for row in group] for name, group in (by_category or {}).items()},
            "absent_rivals": dict(absent or {}),
            "start": dict(start or {}),
        },
    )


def figures_table(rows: Sequence[BenchRow]) -> Table:
    """Of one temperature."""
    best = next((row.best_baseline for row in rows if row.best_baseline), None)
    title = f"temperature {rows[0].temperature:g}" + (f", mlx-lm at its best: {best}" if best else "")
    paced = any(row.overruns is not None for row in rows)
    shown = [field for field in COLUMNS if field.title != ("first" if paced else "overran")]
    return tabulated(title, shown, rows, lambda row: "" if row.exact else "WRONG", lambda row: not row.valid)


def _category_table(rows: Sequence[BenchRow], by_category: Mapping[str, Sequence[BenchRow]]) -> Table:
    """The ratio to mlx-lm at its best on the prompts of each category: a column a contender."""

    def ratio(group: Sequence[BenchRow], row: BenchRow) -> Cell:
        same = (row.contender, row.temperature)
        found = next((one for one in group if (one.contender, one.temperature) == same and one.exact), None)
        return found and found.over_best and found.over_best.median

    groups = (*by_category.items(), ("all", rows))
    return Table(
        "/mlx-lm by category",
        (Column(""), *(Column(row.contender, ".2f") for row in rows)),
        tuple((category, *(ratio(group, row) for row in rows)) for category, group in groups),
    )


def _parts_table(found: Sequence[Parts], contenders: Sequence[str]) -> Table:
    """Of one temperature: a column a contender, and two for the shares."""
    titles = (*contenders, "draft's share", "lookup's share")
    return Table(
        "seconds of plain (ar) / those of each",
        (Column(""), *(Column(title, ".2f") for title in titles)),
        tuple((each.category, *map(each.over_each.get, contenders), each.draft, each.lookup) for each in found),
        _PARTS,
    )


def _start_table(start: Mapping[str, Start]) -> Table:
    cells = ((part, *(each.get(part) for each in start.values())) for part in _START)
    return Table("start, s", (Column(""), *(Column(name, ".2f") for name in start)), tuple(cells), _STARTED)


def _checks(rows: Sequence[BenchRow]) -> Iterator[Check]:
    for row in rows:
        name = f"{row.contender} at temperature {row.temperature:g}"
        if not row.exact:
            others = row.deviating - len(row.ties)
            text = f"{others} of {row.checked} generations differ from the reference"
            yield Check(name, "fail", text + (f", and {len(row.ties)} more part from it at near-ties" * bool(row.ties)))
        elif row.ties:
            yield Check(
                name,
                "warn",
                f"{len(row.ties)} of {row.checked} generations part from the reference at near-ties, the widest of "
                f"which is {max(row.ties):.2g} standard deviations of the logits",
                "the stage widths of first-light tells how close such ties are here",
            )
        elif row.checked:
            yield Check(name, "ok", f"{row.checked} generations compared, all equal")
        if not row.representative:
            text = f"invalid: {row.overruns:.1%} of its forwards took longer than the profile's device would"
            yield Check(name, "warn", text, "use a faster or quieter machine, or a slower profile")


_VALUES = (
    *("contender", "draft_tokens", "temperature", "tokens_per_second", "best_baseline"),
    *("checked", "deviating", "ties", "rival", "overruns"),
)


def _values(row: BenchRow) -> dict[str, Any]:
    """A row as JSON values; an interval has its bounds by name."""
    speeds = [one.tokens_per_second for one in row.generations]
    return {
        **{name: getattr(row, name) for name in _VALUES},
        **{name: row.median(name) for name in FIGURES},
        "generations": len(speeds),
        "quartiles": row.quartiles._asdict(),
        "slowest": min(speeds),
        "fastest": max(speeds),
        "inter_token_p50": row.inter_token(0.5),
        "inter_token_p95": row.inter_token(0.95),
        "over_best": row.over_best and _ratio(row.over_best),
        "ratios": {baseline: _ratio(ratio) for baseline, ratio in row.ratios.items()},
    }


def _ratio(ratio: Ratio) -> dict[str, Any]:
    return {"median": ratio.median, "interval": ratio.interval and ratio.interval._asdict()}


# Notes -----------------------------------------------------------------------------------------------

_MEDIANS = (
    "Figures are medians over prompts and repeats, and tok/s counts the turns of a prompt together; docs/lab/pacing.md "
    "defines the columns."
)
_FASTEST = "Of contenders that differ only in K the table has the fastest; --json has all."
_PARTS = (
    "Medians of the seconds of whole requests, prompts included. The draft's share: lookup alone over adaptive; "
    "lookup's: without lookup over adaptive. Above 1 it earns what it costs. The blind draft guesses at the same cost."
)
_START = ("tokenizer", "weights", "warm-up and costs", "ready", "first token")
_STARTED = (
    "ready: from the start of the first process on, Python and imports included. Ours has a draft too, loads at once "
    "what mlx-lm loads in turn, and its weights include the proof of its level; costs are measured at the first start "
    "with a model on a GPU. first token: of a request then."
)
_RIVAL = (
    "llama.cpp: its own server with the GGUF file of the same weights, on all cores. It computes with "
    "packed weights, so its texts differ and are not compared. Its seconds are by its own clock, from the same moment "
    "as everyone's."
)
_REPLAYED = (
    "Replayed: the target's texts were recorded once by its own decoding. No contender ran the target's model; exact "
    "means equal to the recorded text."
)


def _notes(rows: Sequence[BenchRow], plan: BenchPlan, absent: Mapping[str, str]) -> Iterator[str]:
    yield from (f"{name} is not in the table: {reason}." for name, reason in absent.items())
    yield _MEDIANS
    if len(best_of_each_line(rows)) < len(rows):
        yield _FASTEST
    if any(row.rival for row in rows):
        yield _RIVAL
    if plan.pace:
        yield _pace(load_profile(plan.pace))
    if plan.replays:
        yield _REPLAYED


def _pace(profile: DeviceProfile) -> str:
    slow = (
        f"\nEverything ran {profile.slow_motion:g} times slower. The figures are in the time of the device, with the "
        "whole overhead of our rounds; what else Python does between forwards, here and in mlx-lm, counts only in part."
    )
    return (
        f"Paced as {profile.name} ({profile.description}). mlx-lm: target and draft on the target's device, one after "
        f"the other. Ours: the draft on a device of its own; every forward takes {profile.both_busy.factor:g} times as "
        "long under strategies whose draft and target overlap. mlx-lm's prefill is not paced, so there are no times to "
        f"the first token to compare.{'' if profile.slow_motion == 1.0 else slow}"
    )


# Recorded texts, for paced contenders -------------------------------------------------------------

_FILE = "texts.jsonl"


def recorded(plan: BenchPlan, requests: Sequence[BenchRequest], on_text: Callable[[str], None]) -> Path:
    """The file with the text of every request of the plan. It is recorded by target-only decoding if it is absent.

    `on_text` is called after each text. The recording is complete or absent: a stopped one leaves nothing. Raises
    InputError for a recording that does not fit, PipelineError if the target fails.
    """
    target = plan.models().target
    fingerprint, tasks = ModelFolder(target).fingerprint, distinct_tasks(plan, requests)
    folder = cache_folder() / "recorded-texts" / _name(fingerprint, tasks)
    path = made_once(folder, lambda unfinished: _record(target, fingerprint, tasks, on_text).write(unfinished / _FILE))
    RecordedTexts.read(path / _FILE, fingerprint)
    return path / _FILE


def distinct_tasks(plan: BenchPlan, requests: Sequence[BenchRequest]) -> list[GenerationTask]:
    """The tasks of the plan, each text once: the seed has no effect at temperature 0."""
    tasks = (
        GenerationTask(tokens, plan.max_tokens, each.temperature, each.seed if each.temperature else 0)
        for each, tokens in settings(plan.repeats, requests, plan.temperatures)
    )
    return list(dict.fromkeys(tasks))


def _record(
    target: Path, fingerprint: str, tasks: Sequence[GenerationTask], on_text: Callable[[str], None]
) -> RecordedTexts:
    with Pipeline(str(target), draft_engine=NO_DRAFT, strategy="ar", arena_memory=0) as pipeline:
        state, texts = pipeline.state(), []
        for task in tasks:
            tokens = pipeline.generate(task.tokens, task.sampling()).tokens
            texts.append(RecordedText(prompt=task.tokens, temperature=task.temperature, seed=task.seed, tokens=tokens))
            on_text("Recording")
    header = RecordedTarget(
        model_fingerprint=fingerprint, vocabulary=state.vocabulary, context=state.context, texts=len(texts)
    )
    return RecordedTexts(header, texts)


def _name(fingerprint: str, tasks: Sequence[GenerationTask]) -> str:
    """Another name for each target and each set of requests."""
    return hashlib.sha256(msgspec.json.encode((fingerprint, tasks))).hexdigest()[:24]
