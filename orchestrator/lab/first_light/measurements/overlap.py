"""Draft and target at the same time: what each loses, and what is won over taking turns."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from orchestrator.lab.bench.plan import BenchModels
from orchestrator.lab.calibration import OVERLAP_WIDTHS, both_at_once
from orchestrator.lab.findings import Findings, Table, Value
from orchestrator.lab.first_light.measurements.texts import measured_pair, plan
from orchestrator.lab.first_light.needs import has_neural_engine
from orchestrator.lab.first_light.stages import Asked
from orchestrator.machine.drafts.converted_draft import converted_draft
from orchestrator.machine.hardware import computes_on_gpu
from protocol.contracts.engines import DraftEngineName
from protocol.errors import PipelineError


class Overlap(NamedTuple):
    """A target and a draft that are slowed down while the other computes."""

    target_alone: float
    draft_alone: float
    target_beside: float
    """The time of a step while the other is always busy."""
    draft_beside: float

    @property
    def target_slow_down(self) -> float:
        return self.target_beside / self.target_alone

    @property
    def draft_slow_down(self) -> float:
        return self.draft_beside / self.draft_alone

    @property
    def gain(self) -> float:
        """Work a second of both at once over that of taking turns: 2 if neither slows the other, 1 if nothing is won.

        In a second the target does 1 / target_beside steps, which alone take target_alone each; likewise the draft.
        """
        return 1 / self.target_slow_down + 1 / self.draft_slow_down

    @property
    def pair_seconds(self) -> float:
        """One step of each, begun together: both slowed down until the shorter one ends, then the other alone."""
        first, last = sorted(
            (
                (self.target_beside, self.target_alone, self.target_slow_down),
                (self.draft_beside, self.draft_alone, self.draft_slow_down),
            )
        )
        beside, _, _ = first
        _, alone, slow_down = last
        return beside + alone - beside / slow_down

    @property
    def pair_speed_up(self) -> float:
        return (self.target_alone + self.draft_alone) / self.pair_seconds

    @property
    def efficiency(self) -> float:
        return efficiency(self.target_alone, self.draft_alone, self.pair_seconds)


def efficiency(one: float, other: float, together: float) -> float:
    """The share of the shorter step that is hidden: 1 if it costs nothing, 0 if both take as long as in turns.

    An M4 was reported to take 22.1 ms for a step of each in turns and 16.8 ms at once, at 73%: with 7.3 ms for the
    Neural Engine's step, (22.1 - 16.8) / 7.3.
    """
    return (one + other - together) / min(one, other)


_COLUMNS = ("step", "alone, ms", "beside the other, ms", "slow-down")
_CORE_ML = "Core ML decides where it runs the draft; the stage neural-engine tells whether it is the Neural Engine."
_OTHERS = (
    Value(
        "speed-up of a pair of steps, GPU and Neural Engine",
        1.32,
        "×",
        "reported",
        "M4: 22.1 ms in turns, 16.8 at once",
    ),
    Value("overlap efficiency, GPU and Neural Engine", 73, "%", "reported", "M4, the same"),
    Value("the GPU's loss beside a busy Neural Engine, from", 3, "%", "reported", "M5 Pro"),
    Value("the GPU's loss beside a busy Neural Engine, to", 18, "%", "reported", "larql, pull request 312"),
)


def measure(asked: Asked) -> Findings:
    models = plan().models()
    where = "both on the GPU" if computes_on_gpu() else "each on its own cores"
    found = _measured(asked, models, models.draft, "mlx", where)
    if not has_neural_engine():
        return _told(models, "GPU and Neural Engine: not here, no Neural Engine with Core ML.", found)
    asked.so_far(_told(models, "GPU and Neural Engine: not measured.", found))
    try:
        draft = converted_draft(str(models.draft), lambda report: asked.notice(report.stage))
        beside = _measured(asked, models, draft, "coreml", "target on the GPU, draft in Core ML")
    except PipelineError as error:
        return _told(models, f"GPU and Neural Engine: not measured. {error}", found)
    return _told(models, _CORE_ML, beside, found)


class _Measured(NamedTuple):
    overlap: Overlap
    """Milliseconds."""
    where: str
    """Where both compute."""


def _measured(asked: Asked, models: BenchModels, draft: Path, engine: DraftEngineName, where: str) -> _Measured:
    """`draft`: what `engine` runs."""
    times = both_at_once(models.target, draft, engine, samples=asked.sized(2, 30), notice=asked.notice)
    return _Measured(Overlap(*(1e3 * seconds for seconds in times)), where)


def _told(models: BenchModels, note: str, *found: _Measured) -> Findings:
    return Findings(
        values=(*(value for each in found for value in _values(*each)), *_OTHERS),
        tables=tuple(_table(*each) for each in found),
        notes=(*measured_pair(models), note),
    )


def _values(overlap: Overlap, where: str) -> Iterator[Value]:
    yield Value(
        f"speed-up of a pair of steps, {where}",
        overlap.pair_speed_up,
        "×",
        "computed",
        "(target alone + draft alone) / time of one step of each, begun together",
    )
    yield Value(
        f"overlap efficiency, {where}",
        100 * overlap.efficiency,
        "%",
        "computed",
        "(target alone + draft alone - together) / the shorter one",
    )
    yield Value(
        f"work a second over taking turns, {where}",
        overlap.gain,
        "×",
        "computed",
        "1 / the target's slow-down + 1 / the draft's; 2 if neither loses anything",
    )


def _table(overlap: Overlap, where: str) -> Table:
    target, draft = (f"{width} tokens" for width in OVERLAP_WIDTHS)
    rows = (
        (f"target, {target}", overlap.target_alone, overlap.target_beside, overlap.target_slow_down),
        (f"draft, {draft}", overlap.draft_alone, overlap.draft_beside, overlap.draft_slow_down),
    )
    return Table(where[0].upper() + where[1:], _COLUMNS, rows, "Medians; beside: while the other works without pause.")
