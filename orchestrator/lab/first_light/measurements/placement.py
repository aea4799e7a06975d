"""Where the draft should compute: on the target's device in turns, on it beside the target, or on the Neural Engine."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from orchestrator.api.pipeline import Pipeline
from orchestrator.core.options import PlacementChoice
from orchestrator.lab.bench.contender import AUTOREGRESSIVE, GenerationTask, PipelineContender, TimedGeneration
from orchestrator.lab.bench.plan import BenchModels
from orchestrator.lab.bench.trials import encoded
from orchestrator.lab.findings import Field, Findings, tabulated
from orchestrator.lab.first_light.measurements.texts import measured_pair, plan, prompts
from orchestrator.lab.first_light.needs import has_neural_engine
from orchestrator.lab.first_light.stages import Asked
from orchestrator.machine.drafts.converted_draft import converted_draft
from orchestrator.machine.hardware import computes_on_gpu
from protocol.contracts.engines import DraftEngineName
from protocol.errors import PipelineError

_TEMPERATURES = (0.0, 0.8)
_NOTE = "Medians over texts; the first text of each pipeline is not counted, since its estimates begin with it."


class _Place(NamedTuple):
    name: str
    strategy: str
    placement: PlacementChoice = "auto"
    engine: DraftEngineName = "mlx"


class Decoded(NamedTuple):
    """By one pipeline, at one temperature."""

    place: str
    temperature: float
    rate: float
    """Tokens a second."""
    target_busy: float
    draft_busy: float


def measure(asked: Asked) -> Findings:
    ours = plan(temperature=_TEMPERATURES)
    models = ours.models()
    texts = encoded(prompts(models, asked.sized(2, 5)), ours)
    temperatures = _TEMPERATURES[: asked.sized(1, 2)]
    tasks = [GenerationTask(text, asked.sized(12, 96), heat, 1) for heat in temperatures for text in texts]
    found: list[Decoded] = []
    notes = list(measured_pair(models))
    for place in _places():
        try:
            draft = models.draft
            if place.engine == "coreml":
                draft = converted_draft(str(draft), lambda report: asked.notice(report.stage))
            found += _decoded(place, models._replace(draft=Path(draft)), tasks, asked)
        except PipelineError as error:
            if place.engine != "coreml":
                raise
            notes.append(f"{place.name}: not measured. {error}")
        asked.so_far(findings(found, notes))
    return findings(found, notes)


def _places() -> list[_Place]:
    """Core ML last: its load may take long, or not end."""
    device = "the GPU" if computes_on_gpu() else "the same cores"
    beside = f"{device}, beside" if computes_on_gpu() else "cores of its own, beside"
    places = [
        _Place("no draft", AUTOREGRESSIVE),
        _Place(f"{device}, in turns", "adaptive", "shared"),
        _Place(beside, "adaptive", "apart"),
    ]
    return [*places, *([_Place("Core ML, beside", "adaptive", "apart", "coreml")] if has_neural_engine() else [])]


def _decoded(place: _Place, models: BenchModels, tasks: Sequence[GenerationTask], asked: Asked) -> list[Decoded]:
    asked.notice(f"{place.name}, loading models")
    settings = models.settings(place.strategy, place.engine).changed(placement=place.placement)
    with Pipeline(settings=settings, arena_memory=0) as pipeline:
        contender = PipelineContender(place.name, pipeline)
        timed: dict[float, list[TimedGeneration]] = {}
        for number, task in enumerate(tasks, 1):
            asked.notice(f"{place.name}, text {number} of {len(tasks)}")
            timed.setdefault(task.temperature, []).append(contender.generate(task))
    return [_median(place.name, heat, generated[1:]) for heat, generated in timed.items()]


def _median(place: str, temperature: float, timed: Sequence[TimedGeneration]) -> Decoded:
    figures = [one.statistics for one in timed if one.statistics is not None]
    return Decoded(
        place,
        temperature,
        rate=median(one.tokens_per_second for one in timed),
        target_busy=median(one.target_busy for one in figures),
        draft_busy=median(one.draft_busy for one in figures),
    )


def findings(found: Sequence[Decoded], notes: Sequence[str]) -> Findings:
    fields: list[Field[Decoded]] = [
        Field("draft on", lambda one: one.place),
        Field("temperature", lambda one: one.temperature),
        Field("tokens/s", lambda one: one.rate, ".1f"),
        Field("target busy", lambda one: one.target_busy, ".2f"),
        Field("draft busy", lambda one: one.draft_busy, ".2f"),
    ]
    return Findings(
        tables=(tabulated("Where the draft computes", fields, found, note=_NOTE),),
        settled=tuple(
            _sentence([one for one in found if one.temperature == heat])
            for heat in dict.fromkeys(one.temperature for one in found)
        ),
        notes=tuple(notes),
    )


def _sentence(found: Sequence[Decoded]) -> str:
    """Of one temperature."""
    rates = ", ".join(f"{one.place} {one.rate:.1f}" for one in found)
    best = max(found, key=lambda one: one.rate)
    return f"Placement at T = {found[0].temperature:g}, tokens/s with the draft on: {rates}; fastest: {best.place}."
