"""What `bench` answers: every strategy's tokens, where the draft should compute, and the speed beside mlx-lm's own."""

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from orchestrator.api.pipeline import Pipeline
from orchestrator.api.sampling import SamplingParams
from orchestrator.core.policy.strategies import STRATEGIES
from orchestrator.lab.bench import strategies
from orchestrator.lab.bench.plan import BenchModels, BenchPlan
from orchestrator.lab.bench.prompts import BenchPrompt, read_prompts
from orchestrator.lab.findings import Answer, Findings, Listener, Table
from orchestrator.lab.first_light.stages import SECOND_PAIR, Asked, OnNotice, has_neural_engine
from orchestrator.machine.drafts.auto_draft import place_of
from orchestrator.machine.drafts.converted_draft import conversion_of, is_converted
from orchestrator.machine.hardware import computes_on_gpu
from orchestrator.machine.pairs.recommended_pairs import pairs
from orchestrator.text.chat_template import own_template
from protocol.contracts.coreml import EngineVerdict, recorded
from protocol.contracts.engines import NO_DRAFT, PrefillEngineName
from protocol.errors import PipelineError
from protocol.shown_names import model_name

_TEMPERATURES = (0.0, 0.8)


# Texts that stages let the target continue: shipped prompts, never a user's ---------------------------


def plan(**changes: Any) -> BenchPlan:
    """A comparison of the default pair, or as `changes` say."""
    options: dict[str, Any] = {
        "target": None,
        "draft": None,
        "strategies": "ar,adaptive",
        "draft_tokens": "2,4",
        "temperature": (0.0,),
        "repeats": 1,
        "max_tokens": 48,
    }
    return BenchPlan.of(**(options | changes))


def larger_plan(asked: Asked, **changes: Any) -> BenchPlan:
    """Of the second pair, which the first use downloads."""
    pair = pairs()[SECOND_PAIR]
    asked.notice(f"{SECOND_PAIR}: fetching what is not on the disk")
    return plan(target=pair.target.id, draft=pair.draft.id, **changes)


def measured_pair(models: BenchModels) -> tuple[str, ...]:
    """Notes that say which models a stage measured."""
    names = f"Target {model_name(models.target)}, draft {model_name(models.draft)}."
    return (names, models.note) if models.note else (names,)


def prompts(models: BenchModels, count: int) -> list[BenchPrompt]:
    """Shipped ones that suit the target."""
    return read_prompts(None, count, chat=own_template(str(models.target)) is not None)


# Speed ------------------------------------------------------------------------------------------------


def bench(asked: Asked) -> Findings:
    """Every strategy, each token compared with plain decoding's."""
    ours = plan(
        strategies=",".join(STRATEGIES),
        draft_tokens="0" if asked.settings.short else "2,4",
        temperature=_TEMPERATURES,
        max_tokens=asked.sized(12, 64),
    )
    found = compared(ours, 1, asked.notice) if asked.settings.short else _with_core_ml(ours, 4, asked.notice)
    equal, ties = (sum(check.status == status for check in found.checks) for status in ("ok", "warn"))
    text = f"Of {len(found.checks)} comparisons of a contender at a temperature {equal} have the target's own tokens"
    text += f", and {ties} part from them at near-ties alone." if ties else "."
    answers = (Answer("exactness", text), *_speeds(found, "speed"))
    return msgspec.structs.replace(found, answers=answers)


def larger_bench(asked: Asked) -> Findings:
    found = _with_core_ml(larger_plan(asked, temperature=_TEMPERATURES), 3, asked.notice)
    return msgspec.structs.replace(found, answers=tuple(_speeds(found, "speed, larger pair")))


def _speeds(found: Findings, question: str) -> Iterator[Answer]:
    """A sentence for each temperature."""
    ratios: dict[float, list[str]] = {}
    for row in found.figures["results"]:
        if row["over_best"] is not None:
            shown = f"{row['contender']} {row['over_best']['median']:.2f}"
            ratios.setdefault(row["temperature"], []).append(shown)
    for heat, each in ratios.items():
        yield Answer(question, f"T = {heat:g}, of mlx-lm at its best: {', '.join(each)}.")


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
    notice("loading models")
    models, watch = ours.models(), _Noticing(notice)
    found = strategies.measure(ours, prompts(models, texts), watch)
    return msgspec.structs.replace(found, notes=(*measured_pair(models), *watch.notes, *found.notes))


def _with_core_ml(ours: BenchPlan, texts: int, notice: OnNotice) -> Findings:
    note = ""
    if has_neural_engine():
        ours, note = with_core_ml_draft(ours, ours.models())
    found = compared(ours, texts, notice)
    return msgspec.structs.replace(found, notes=tuple(filter(None, (note, *found.notes))))


def with_core_ml_draft(ours: BenchPlan, models: BenchModels) -> tuple[BenchPlan, str]:
    """The plan with a line whose draft runs in Core ML, or the plan as it is and why it has none.

    A draft that failed its examination would be run by MLX: its line would be another's under a wrong name. Of one that
    was not examined nobody knows where it runs.
    """
    try:
        verdict = _examined(models.draft)
    except PipelineError as error:
        return ours, f"A draft in Core ML: not here. {error}"
    if verdict is None or verdict.choice == "unknown":
        return ours, "A draft in Core ML: not here. `launch-pipeline doctor --neural-engine` has no verdict on it."
    if verdict.choice != "coreml":
        return ours, f"A draft in Core ML: not here. Its examination decided for MLX ({verdict.reason})."
    return replace(ours, core_ml_draft=True), ""


def _examined(draft: Path) -> EngineVerdict | None:
    """What an examination of this draft on this machine found; None if there was none, for which it is converted."""
    folder = conversion_of(draft)
    return recorded(place_of(folder)) if is_converted(folder) else None


# Prompts -----------------------------------------------------------------------------------------------

_READERS: dict[PrefillEngineName, str] = {"none": "the target itself", "mlx": "MLX process"}
_LENGTHS, _ON_A_PROCESSOR, _SHORT = (64, 128, 256, 512, 1024, 2048), (64, 256, 512), (64, 128)
_PROMPTS_NOTE = (
    "Milliseconds from the request to the first token at the client; random prompts, none of which shares a beginning "
    "with another. A prompt that is too short for the prefill process is read by the target itself."
)


def prefill(asked: Asked) -> Findings:
    """Reading a prompt: by the target itself, and by a prefill process; by the prompt's length."""
    times: dict[PrefillEngineName, dict[int, float]] = {}
    for engine in _READERS:
        times[engine] = _first_tokens(asked, engine)
        asked.so_far(_read(times))
    return _read(times)


def _first_tokens(asked: Asked, engine: PrefillEngineName) -> dict[int, float]:
    """Seconds to the first token by the prompt's length."""
    gpu = computes_on_gpu()
    lengths = _SHORT if asked.settings.short else _LENGTHS if gpu else _ON_A_PROCESSOR
    asked.notice(f"{_READERS[engine]}, loading models")
    times: dict[int, float] = {}
    target = str(plan().models().target)
    with Pipeline(target, draft_engine=NO_DRAFT, strategy="ar", prefill_engine=engine) as pipeline:
        state = pipeline.state()
        for length in (length for length in lengths if length + 2 <= state.context):
            asked.notice(f"{_READERS[engine]}, {length} tokens")
            times[length] = _first_token(pipeline, state.vocabulary, length, asked.sized(1, 5 if gpu else 2))
    return times


def _read(times: dict[PrefillEngineName, dict[int, float]]) -> Findings:
    rows = tuple((length, *(1e3 * seconds[length] for seconds in times.values())) for length in times["none"])
    columns = ("prompt tokens", *(f"{_READERS[engine]}, ms" for engine in times))
    length = max(times["none"])
    told = ", ".join(f"{_READERS[engine]} {1e3 * seconds[length]:.0f}" for engine, seconds in times.items())
    text = f"Milliseconds to the first token behind {length:,} tokens: {told}."
    return Findings(
        tables=(Table("Time to the first token", columns, rows, _PROMPTS_NOTE),),
        answers=(Answer("prompts", text),),
    )


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
