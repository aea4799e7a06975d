"""What becomes of a pipeline around and beside its decoding: its start, a conversion in the background, sleep."""

import tempfile
import time
from collections.abc import Callable, Sequence
from statistics import median

import msgspec

from orchestrator.api.pipeline import Pipeline
from orchestrator.api.sampling import UNFILTERED, SamplingParams
from orchestrator.lab.bench.plan import BenchModels
from orchestrator.lab.bench.trials import encoded, starts
from orchestrator.lab.findings import Answer, Findings, Listener, Value
from orchestrator.lab.first_light.pipelines import measured_pair, plan, prompts
from orchestrator.lab.first_light.stages import Asked
from protocol.child_process import ChildProcess, Failed, module_command
from protocol.contracts.coreml import Choices, ConversionOrder, ConversionReport
from protocol.errors import PipelineError

_CONVERTER = "draft_worker.coreml.conversion"
_NICE = ("nice", "-n", "10")
"""As the pipeline's own preparation of a draft."""
_SLEEP = 5.0
"""Seconds by which the clock on the wall runs ahead of the processor's when a machine has slept."""
_PATIENCE = 240.0


def start(asked: Asked) -> Findings:
    """From nothing to the first token, by part: mlx-lm, then the pipeline with its draft."""
    models, tokens = _task()
    asked.notice("starting mlx-lm and adaptive")
    found = starts(plan(), tokens, Listener())
    known = {name: {part: s for part, s in parts.items() if s is not None} for name, parts in found.items()}
    values = tuple(Value(f"{name}, {part}", s, "s") for name, parts in known.items() for part, s in parts.items())
    told = "; ".join(
        f"{name}: {', '.join(f'{part} {s:.2f}' for part, s in parts.items())}" for name, parts in known.items()
    )
    return Findings(
        values=values, answers=(Answer("start", f"Seconds from nothing: {told}."),), notes=measured_pair(models)
    )


def conversion(asked: Asked) -> Findings:
    """Tokens a second without a draft, before and while one is converted with the priority of the background."""
    models, tokens = _task()
    count = asked.sized(12, 96)
    with tempfile.TemporaryDirectory() as room, Pipeline(settings=models.settings("ar"), arena_memory=0) as pipeline:
        alone = [_rate(pipeline, tokens, count) for _ in range(asked.sized(2, 4))][1:]
        asked.notice("converting")
        order = ConversionOrder(source=str(models.draft), destination=f"{room}/package", choices=Choices())
        command = [*_NICE, *module_command(_CONVERTER), msgspec.json.encode(order).decode()]
        beside: list[float] = []
        began = time.perf_counter()
        with ChildProcess(command) as process:
            found: Sequence[ConversionReport] | None = ()
            while found is not None:
                for failed in (each for each in found if isinstance(each, Failed)):
                    raise PipelineError(failed.text)
                beside.append(_rate(pipeline, tokens, count))
                found = process.read(ConversionReport, 0.0)
            if process.wait():
                raise PipelineError(f"The conversion ended unexpectedly. Its last words: {process.last_words}")
        seconds = time.perf_counter() - began
    quiet, busy = median(alone), median(beside)
    text = (
        f"Without a draft: {quiet:.1f} tokens/s alone, and {busy:.1f} while a draft is converted, which took "
        f"{seconds:.0f} s ({busy / quiet:.2f} of the speed)."
    )
    return Findings(answers=(Answer("conversion", text),), notes=measured_pair(models))


def sleep(asked: Asked) -> Findings:
    """A person closes the lid while a pipeline is idle: what comes after it wakes."""
    models, tokens = _task()
    count = asked.sized(12, 96)
    with Pipeline(settings=models.settings("adaptive"), arena_memory=0) as pipeline:
        before = [_rate(pipeline, tokens, count) for _ in range(3)][1:]
        asked.notice("ready: put this machine to sleep now, and wake it after half a minute")
        slept = asleep(_PATIENCE)
        if slept is None:
            raise PipelineError(
                f"This machine did not sleep within {_PATIENCE / 60:.0f} minutes: start the stage again, and close the "
                "lid or choose Sleep when it says so."
            )
        after = [_rate(pipeline, tokens, count) for _ in range(3)]
        lost = pipeline.state().lost
    text = (
        f"After {slept:.0f} s of sleep {lost} workers were lost; tokens/s: {median(before):.1f} before, {after[0]:.1f} "
        f"in the first request, {median(after[1:]):.1f} later."
    )
    return Findings(answers=(Answer("sleep", text),), notes=measured_pair(models))


def asleep(
    patience: float,
    wall: Callable[[], float] = time.time,
    steady: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> float | None:
    """Wait until the machine has slept: for how many seconds; None if it does not within `patience` seconds. The steady
    clock stands still meanwhile (Python's `time.monotonic` on macOS and Linux)."""
    end, ahead = steady() + patience, wall() - steady()
    while steady() < end:
        pause(1.0)
        if (slept := wall() - steady() - ahead) > _SLEEP:
            return slept
    return None


def _task() -> tuple[BenchModels, tuple[int, ...]]:
    models = plan().models()
    return models, encoded(prompts(models, 1), plan())[0]


def _rate(pipeline: Pipeline, tokens: Sequence[int], count: int) -> float:
    """Tokens a second of a request."""
    sampling = SamplingParams(temperature=0.0, **UNFILTERED, max_tokens=count)
    return pipeline.generate(list(tokens), sampling).statistics.tokens_per_second
