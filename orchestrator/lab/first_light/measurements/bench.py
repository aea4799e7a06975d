"""Our strategies against mlx-lm's own decoding, with the default pair and with a larger one."""

from dataclasses import replace
from pathlib import Path

import msgspec

from orchestrator.lab.bench import strategies
from orchestrator.lab.bench.plan import BenchModels, BenchPlan
from orchestrator.lab.findings import Findings, Listener
from orchestrator.lab.first_light.measurements.texts import measured_pair, plan, prompts
from orchestrator.lab.first_light.needs import has_neural_engine
from orchestrator.lab.first_light.stages import Asked, OnNotice
from orchestrator.machine.drafts.auto_draft import place_of
from orchestrator.machine.drafts.converted_draft import conversion_of, is_converted
from orchestrator.machine.pairs.recommended_pairs import pairs
from protocol.contracts.coreml import EngineVerdict, recorded
from protocol.errors import PipelineError


def measure(asked: Asked) -> Findings:
    if asked.settings.short:
        # One strategy brings no controls, each of which would be a pipeline more.
        return compared(plan(strategies="ar", draft_tokens="2", max_tokens=12), 1, asked.notice)
    return compared(plan(temperature=(0.0, 0.8)), 4, asked.notice)


def measure_larger(asked: Asked) -> Findings:
    """With the second pair, which the first use downloads."""
    pair = pairs()[asked.settings.second_pair]
    asked.notice(f"{asked.settings.second_pair}: fetching what is not on the disk")
    return compared(plan(target=pair.target.id, draft=pair.draft.id, temperature=(0.0, 0.8)), 3, asked.notice)


class _Noticing(Listener):
    """Tells what the stage does, and keeps notes for its findings."""

    def __init__(self, notice: OnNotice) -> None:
        self.notes: list[str] = []
        self._notice = notice

    def starting(self, what: str) -> None:
        self._notice(f"{what}, loading")

    def finished(self, what: str) -> None:
        self._notice(what)

    def note(self, sentence: str) -> None:
        self.notes.append(sentence)


def compared(ours: BenchPlan, texts: int, notice: OnNotice) -> Findings:
    """Every contender of the plan with so many prompts."""
    models = ours.models()
    told, watch = [*measured_pair(models)], _Noticing(notice)
    if has_neural_engine() and "adaptive" in ours.strategies:
        ours, note = with_core_ml_draft(ours, models)
        told.append(note)
    notice("loading models")
    found = strategies.measure(ours, prompts(models, texts), watch)
    return msgspec.structs.replace(
        found,
        notes=(*filter(None, told), *watch.notes, *found.notes),
        panels=(),
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
