"""Our strategies against mlx-lm's own decoding, with the default pair."""

from dataclasses import replace
from pathlib import Path

from orchestrator.lab.bench.figures import BenchRow, best_of_each_line, rows
from orchestrator.lab.bench.models import BenchModels
from orchestrator.lab.bench.plan import BenchPlan
from orchestrator.lab.bench.trials import requests_of, run
from orchestrator.lab.findings import Cell, Check, Findings, Table
from orchestrator.lab.first_light.asked import Asked, OnNotice
from orchestrator.lab.first_light.measurements.texts import measured_pair, plan, prompts
from orchestrator.lab.first_light.needs import computes_on_gpu, has_neural_engine
from orchestrator.machine.drafts.auto_draft import place_of
from orchestrator.machine.drafts.converted_draft import conversion_of, is_converted
from protocol.contracts.coreml.neural_engine import EngineVerdict, recorded
from protocol.errors import PipelineError

_COLUMNS = (
    *("contender", "temperature", "tokens/s", "ratio to mlx-lm's best", "tokens a round"),
    *("acceptance, %", "first token, ms", "texts", "differing"),
)
_NOTE = (
    "Medians over prompts; one contender computes at a time. mlx-lm's best: on all cores, plain or with its best "
    "number of draft tokens. differing: texts that are not the reference's, see `launch-pipeline bench --help`."
)


def measure(asked: Asked) -> Findings:
    if asked.settings.short:
        # One strategy brings no controls, each of which would be a pipeline more.
        return compared(plan(strategies="ar", draft_tokens="2", max_tokens=12), 1, asked.notice)
    return compared(plan(temperature=(0.0, 0.8)), 4, asked.notice)


def compared(ours: BenchPlan, texts: int, notice: OnNotice) -> Findings:
    """Every contender of the plan with so many prompts."""
    models = ours.models()
    told = [*measured_pair(models)]
    if has_neural_engine() and "adaptive" in ours.strategies:
        ours, note = with_core_ml_draft(ours, models)
        told.append(note)
    notice("loading models")
    measurements, order = run(
        ours,
        requests_of(prompts(models, texts), ours),
        lambda name: notice(f"{name}, loading"),
        lambda _: None,
        notice,
        lambda *_: None,
        told.append,
    )
    found = rows(measurements, order)
    table = tuple(map(_row, best_of_each_line(found)))
    return Findings(
        tables=(Table("Tokens a second", _COLUMNS, table, _NOTE),),
        checks=tuple(map(_check, found)),
        notes=tuple(filter(None, told)),
    )


def with_core_ml_draft(ours: BenchPlan, models: BenchModels) -> tuple[BenchPlan, str]:
    """The plan with a line whose draft runs in Core ML, or the plan as it is and why it has none.

    A draft that failed its examination would be run by MLX: its line would be another's under a wrong name. Of one that
    was not examined nobody knows where it runs.
    """
    try:
        verdict = _examined(models.draft)
    except PipelineError as error:
        return ours, f"A draft in Core ML: not here. {error}"
    if verdict is None:
        return ours, "A draft in Core ML: not here. `launch-pipeline doctor --neural-engine` has not examined this one."
    if verdict.choice != "coreml":
        return ours, f"A draft in Core ML: not here. Its examination decided for MLX ({verdict.reason})."
    return replace(ours, core_ml_draft=True), ""


def _examined(draft: Path) -> EngineVerdict | None:
    """What an examination of this draft on this machine found; None if there was none, for which it is converted."""
    folder = conversion_of(draft)
    return recorded(place_of(folder)) if is_converted(folder) else None


def _row(row: BenchRow) -> tuple[Cell, ...]:
    return (
        row.contender,
        row.temperature,
        row.tokens_per_second,
        row.over_best and row.over_best.median,
        row.tokens_per_round,
        None if row.acceptance_rate is None else 100 * row.acceptance_rate,
        None if row.time_to_first_token is None else 1e3 * row.time_to_first_token,
        row.generations,
        row.deviating,
    )


def _check(row: BenchRow) -> Check:
    name = f"{row.contender}, temperature {row.temperature:g}"
    if row.exact:
        return Check(name, "ok", f"{row.checked} texts compared, all equal")
    # On a GPU a near-tie may fall otherwise, in mlx-lm's own decoding too.
    status = "warn" if computes_on_gpu() else "fail"
    return Check(name, status, f"{row.deviating} of {row.checked} texts differ from the reference")
