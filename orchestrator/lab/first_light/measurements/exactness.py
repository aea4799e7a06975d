"""Tokens of each strategy against plain decoding, with the weights as they are stored and, on a GPU, in 32 bits."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import TypeAlias

from orchestrator.api.pipeline import Pipeline
from orchestrator.core.policy.strategies import STRATEGIES
from orchestrator.lab.bench.contender import AUTOREGRESSIVE, GenerationTask, PipelineContender
from orchestrator.lab.bench.plan import BenchModels
from orchestrator.lab.bench.trials import encoded
from orchestrator.lab.findings import Findings, Table
from orchestrator.lab.first_light.measurements.texts import measured_pair, plan, prompts
from orchestrator.lab.first_light.stages import Asked, OnNotice
from orchestrator.lab.forwards import WHOLE_FLOAT32, float32_copy
from orchestrator.machine.check import Check
from orchestrator.machine.hardware import computes_on_gpu

STORED, FLOAT32 = "as stored", "float32"
_TEMPERATURES = (0.0, 0.8)
_COLUMNS = ("target", "strategy", "temperature", "texts", "tokens", "differing texts", "first difference at token")
_NOTE = (
    "Plain decoding (ar) is the reference. as stored: the weights and the element type of the model's files; on a "
    "processor MLX computes in float32 either way. A text that differs once is another text from there on."
)
_Row: TypeAlias = tuple[str, str, float, int, int, int, int | None]
_ONE_PRECISION = "float32 beside the stored weights: not here, this processor computes in float32."


def measure(asked: Asked) -> Findings:
    ours = plan()
    models = ours.models()
    gpu = computes_on_gpu()
    texts = encoded(prompts(models, asked.sized(2, 6 if gpu else 4)), ours)
    tasks = [
        GenerationTask(tokens, asked.sized(16, 96 if gpu else 48), temperature, seed)
        for temperature in _TEMPERATURES
        for seed, tokens in enumerate(texts)
    ]
    rows: list[_Row] = []
    for precision in (STORED, FLOAT32) if gpu else (STORED,):
        with _target(models, precision) as chosen:
            expected = _generated(AUTOREGRESSIVE, chosen, tasks, f"{precision}: ar", asked.notice)
            for strategy in (name for name in STRATEGIES if name != AUTOREGRESSIVE):
                got = _generated(strategy, chosen, tasks, f"{precision}: {strategy}", asked.notice)
                rows += [(precision, strategy, *row) for row in compared(tasks, expected, got)]
                asked.so_far(_findings(models, rows, gpu))
    return _findings(models, rows, gpu)


def compared(
    tasks: Sequence[GenerationTask], expected: Sequence[Sequence[int]], got: Sequence[Sequence[int]]
) -> Iterator[tuple[float, int, int, int, int | None]]:
    """By temperature: texts, tokens, texts that differ, and where the first difference is."""
    for temperature in dict.fromkeys(task.temperature for task in tasks):
        pairs = [
            (one, other)
            for task, one, other in zip(tasks, expected, got, strict=True)
            if task.temperature == temperature
        ]
        places = [place for one, other in pairs if (place := first_difference(one, other)) is not None]
        tokens = sum(len(one) for one, _ in pairs)
        yield temperature, len(pairs), tokens, len(places), min(places, default=None)


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first index at which two texts differ; None if they are equal."""
    if tuple(one) == tuple(other):
        return None
    same = min(len(one), len(other))
    return next((index for index in range(same) if one[index] != other[index]), same)


def _findings(models: BenchModels, rows: Sequence[_Row], gpu: bool) -> Findings:
    return Findings(
        tables=(Table("Texts that differ from plain decoding", _COLUMNS, tuple(rows), _NOTE),),
        checks=tuple(_checks(rows, gpu)),
        notes=(*measured_pair(models), *(() if gpu else (_ONE_PRECISION,))),
    )


def _checks(rows: Sequence[_Row], gpu: bool) -> Iterator[Check]:
    """On a processor every token is the target's own; on a GPU a near-tie may fall otherwise, which is told."""
    for precision in dict.fromkeys(row[0] for row in rows):
        texts = sum(row[3] for row in rows if row[0] == precision)
        differing = sum(row[5] for row in rows if row[0] == precision)
        name, text = f"tokens, {precision}", f"{differing} of {texts} texts differ from plain decoding"
        if not differing:
            yield Check(name, "ok", text)
        else:
            advice = "the stage widths tells how close such ties are" if gpu else "please report this: it is a defect"
            yield Check(name, "warn" if gpu else "fail", text, advice)


@contextmanager
def _target(models: BenchModels, precision: str) -> Iterator[BenchModels]:
    if precision == STORED:
        yield models
        return
    with float32_copy(models.target) as copy, _environment(WHOLE_FLOAT32):
        yield models._replace(target=copy)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Processes that start within the context have these variables too."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _generated(
    strategy: str, models: BenchModels, tasks: Sequence[GenerationTask], what: str, notice: OnNotice
) -> list[tuple[int, ...]]:
    notice(f"{what}, loading models")
    # Without arenas every prompt is read anew, as the reference reads it.
    with Pipeline(settings=models.settings(strategy), arena_memory=0) as pipeline:
        contender = PipelineContender(strategy, pipeline)
        done = count(1)
        results = []
        for task in tasks:
            notice(f"{what}, text {next(done)} of {len(tasks)}")
            results.append(contender.generate(task).tokens)
        return results
