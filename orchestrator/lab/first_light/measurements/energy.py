"""Joules a token: plain decoding and adaptive, above what the idle machine takes."""

import sys
import time
from collections.abc import Callable

from orchestrator.api.pipeline import Pipeline
from orchestrator.lab.bench.contender import GenerationTask, PipelineContender
from orchestrator.lab.bench.trials import encoded
from orchestrator.lab.findings import Cell, Findings, Table, Value
from orchestrator.lab.first_light.measurements.texts import plan, prompts
from orchestrator.lab.first_light.power_meter import (
    SETTLING_SECONDS,
    PowerMeter,
    Powermetrics,
    ProcessorCounter,
)
from orchestrator.lab.first_light.stages import Asked, OnNotice
from protocol.errors import PipelineError

_STRATEGIES = ("ar", "adaptive")
_FIRST_SAMPLE_SECONDS = 15.0
_NOTE = (
    "Energy of the machine's parts while the request ran, divided by its tokens; above idle: without what the parts "
    "take while nothing is generated. powermetrics estimates; it compares strategies on one machine, not machines."
)


def measure(asked: Asked) -> Findings:
    meter, mark = _meter(asked.power, asked.notice)
    asked.notice("the idle machine")
    begin = mark()
    time.sleep(asked.sized(1, 10))
    idle = _watts(meter, begin, mark())
    models, ours = plan().models(), plan()
    (prompt,) = encoded(prompts(models, 1), ours)
    rows: list[tuple[Cell, ...]] = []
    for strategy in _STRATEGIES:
        asked.notice(f"{strategy}, loading models")
        with Pipeline(settings=models.settings(strategy), arena_memory=0) as pipeline:
            contender = PipelineContender(strategy, pipeline)
            contender.generate(GenerationTask(prompt, 16, 0.0, 0))
            asked.notice(f"{strategy}, generating")
            begin, tokens = mark(), 0
            while time.monotonic() < begin + asked.sized(1, 15):
                tokens += len(contender.generate(GenerationTask(prompt, asked.sized(16, 256), 0.0, 0)).tokens)
            end = mark()
        time.sleep(SETTLING_SECONDS)
        used = meter.between(begin, end)
        whole, idling = sum(used.values()), sum(idle.values()) * (end - begin)
        parts = ", ".join(f"{part} {joules / (end - begin):.2f}" for part, joules in used.items())
        rows.append((strategy, tokens, tokens / (end - begin), whole / tokens, (whole - idling) / tokens, parts))
    columns = ("strategy", "tokens", "tokens/s", "J a token", "J a token above idle", "W by part")
    return Findings(
        values=tuple(Value(f"idle, {part}", watts, "W") for part, watts in idle.items()),
        tables=(Table("Energy", columns, tuple(rows), _NOTE),),
    )


def _meter(power: int | None, notice: OnNotice) -> tuple[PowerMeter, Callable[[], float]]:
    """This machine's meter, and how it notes a moment."""
    if power is None and sys.platform != "darwin":
        counter = ProcessorCounter()
        return counter, counter.mark
    if power is None:
        raise PipelineError("powermetrics was not started: give --energy at a terminal.")
    notice("waiting for powermetrics")
    meter = Powermetrics(power)
    if not meter.ready(_FIRST_SAMPLE_SECONDS):
        raise PipelineError("powermetrics gave no sample: sudo was refused, or this system states no energy.")
    return meter, time.monotonic


def _watts(meter: PowerMeter, begin: float, end: float) -> dict[str, float]:
    time.sleep(SETTLING_SECONDS)
    return {part: joules / (end - begin) for part, joules in meter.between(begin, end).items()}
