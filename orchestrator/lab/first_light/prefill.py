"""Reading a prompt: by the target itself, by a prefill process in MLX, and by Core ML; by the prompt's length."""

import random
import time
from statistics import median

from orchestrator.api.pipeline import Pipeline
from orchestrator.api.sampling import SamplingParams
from orchestrator.lab.findings import Findings, Table, Value
from orchestrator.lab.first_light.pipelines import plan
from orchestrator.lab.first_light.stages import Asked, has_neural_engine
from orchestrator.machine.hardware import computes_on_gpu
from protocol.contracts.engines import NO_DRAFT, PrefillEngineName
from protocol.errors import PipelineError

_NAMES: dict[PrefillEngineName, str] = {"none": "the target itself", "mlx": "MLX process", "coreml": "Core ML"}
_LENGTHS, _ON_A_PROCESSOR, _SHORT = (64, 128, 256, 512, 1024, 2048), (64, 256, 512), (64, 128)
_NOTE = (
    "Milliseconds from the request to the first token at the client; random prompts, none of which shares a beginning "
    "with another. A prompt that is too short for the prefill process is read by the target itself."
)


def measure(asked: Asked) -> Findings:
    engines: tuple[PrefillEngineName, ...] = ("none", "mlx", "coreml") if has_neural_engine() else ("none", "mlx")
    note = "" if has_neural_engine() else "Core ML: not here, no Neural Engine with Core ML."
    times: dict[PrefillEngineName, dict[int, float]] = {}
    for engine in engines:
        try:
            times[engine] = _first_tokens(asked, engine)
        except PipelineError as error:
            if engine != "coreml":
                raise
            note = f"Core ML: not measured. {error}"
        asked.so_far(_findings(times, note))
    return _findings(times, note)


def _first_tokens(asked: Asked, engine: PrefillEngineName) -> dict[int, float]:
    """Seconds to the first token by the prompt's length."""
    gpu = computes_on_gpu()
    lengths = _SHORT if asked.settings.short else _LENGTHS if gpu else _ON_A_PROCESSOR
    asked.notice(f"{_NAMES[engine]}, loading models")
    times: dict[int, float] = {}
    target = str(plan().models().target)
    with Pipeline(target, draft_engine=NO_DRAFT, strategy="ar", prefill_engine=engine) as pipeline:
        state = pipeline.state()
        for length in (length for length in lengths if length + 2 <= state.context):
            asked.notice(f"{_NAMES[engine]}, {length} tokens")
            times[length] = _first_token(pipeline, state.vocabulary, length, asked.sized(1, 5 if gpu else 2))
    return times


def _findings(times: dict[PrefillEngineName, dict[int, float]], note: str) -> Findings:
    rows = tuple((length, *(1e3 * seconds[length] for seconds in times.values())) for length in times["none"])
    columns = ("prompt tokens", *(f"{_NAMES[engine]}, ms" for engine in times))
    values = [Value("Core ML is faster than MLX from about", 500, "tokens", "reported", "M4, Qwen2.5")]
    if (found := crossover(times.get("coreml", {}), times.get("mlx", {}))) is not None:
        name = "Core ML is faster than an MLX process from"
        values.insert(0, Value(name, found, "tokens", "computed", "and at all longer lengths"))
    return Findings(
        values=tuple(values),
        tables=(Table("Time to the first token", columns, rows, _NOTE),),
        notes=(note,) if note else (),
    )


def crossover(one: dict[int, float], other: dict[int, float]) -> int | None:
    """The shortest length from which on `one` is faster than `other` at all longer ones too; None if there is none."""
    found = None
    for length in sorted(one.keys() & other.keys(), reverse=True):
        if one[length] >= other[length]:
            break
        found = length
    return found


def _first_token(pipeline: Pipeline, vocabulary: int, length: int, repeats: int) -> float:
    """Seconds; the first prompt of a length is not counted."""
    taken: list[float] = []
    for repeat in range(repeats + 1):
        # Other numbers for each length and repeat: a shared beginning would be in the prefix cache.
        source = random.Random(1000 * length + repeat)
        prompt = [source.randrange(vocabulary) for _ in range(length)]
        began = time.perf_counter()
        pipeline.generate(prompt, SamplingParams(temperature=0.0, max_tokens=1))
        taken.append(time.perf_counter() - began)
    return median(taken[1:])
