"""A bench from start to end: opens the contenders, measures them in turns, closes them. Prints nothing."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from orchestrator.api.pipeline import Pipeline
from orchestrator.api.sampling import SamplingParams
from orchestrator.api.settings import PipelineSettings
from orchestrator.core.options import PlacementChoice
from orchestrator.lab.bench.contender import (
    AUTOREGRESSIVE,
    BLIND_DRAFT,
    CORE_ML_DRAFT,
    LLAMA_CPP,
    LOOKUP_ALONE,
    ONE_DEVICE,
    PLAIN,
    PLAIN_OURS,
    WITHOUT_LOOKUP,
    BenchRequest,
    Contender,
    GenerationTask,
    InDeviceTime,
    Measurement,
    PipelineContender,
    contender_name,
    schedule,
    settings,
)
from orchestrator.lab.bench.llama_cpp import PACED, LlamaCppContender, OnRivalAbsent, open_llama_cpp
from orchestrator.lab.bench.mlx_lm import MlxLmContender, running
from orchestrator.lab.bench.plan import CHAINS, BenchModels, BenchPlan
from orchestrator.lab.bench.prompts import BenchPrompt
from orchestrator.lab.findings import Listener
from orchestrator.machine.hardware import computes_on_gpu, gpu_working_set
from orchestrator.machine.profiles.device_profiles import DeviceProfile, load_profile
from orchestrator.text.chat_template import chat_prompt
from orchestrator.text.tokenizer import TextCodec
from protocol.contracts.engines import DraftEngineName
from protocol.contracts.model_folder import ModelFolder
from protocol.errors import InputError, PipelineError


class PipelineEntry(NamedTuple):
    """One pipeline. It is a contender for each K: estimates are shared, as between the requests of a real pipeline."""

    line: str
    strategy: str
    engine: DraftEngineName | None = None
    """None: the draft's own."""
    lookup: bool = True
    placement: PlacementChoice = "auto"
    draft_tokens: tuple[int | None, ...] = (None,)
    """None: the K of the pipeline's options, or a strategy without a K."""

    def settings(self, models: BenchModels) -> PipelineSettings:
        """Of its pipeline."""
        settings = models.settings(self.strategy, self.engine)
        return settings.changed(lookup="on" if self.lookup else "off", placement=self.placement)


def entries(plan: BenchPlan, *, trained: bool = False, gpu: bool = False) -> Iterator[PipelineEntry]:
    """The plan's strategies; beside `adaptive` its parts, plain decoding first. `trained`: as of `BenchModels`;
    `gpu`: a target and a draft in MLX share it."""
    adaptive = "adaptive" in plan.strategies
    for strategy in dict.fromkeys(((AUTOREGRESSIVE,) if adaptive else ()) + plan.strategies):
        line = PLAIN_OURS if strategy == AUTOREGRESSIVE else strategy
        yield PipelineEntry(line, strategy, draft_tokens=_chain_lengths(plan, strategy))
        if strategy == "adaptive" and (plan.pace or gpu):
            # The draft's own device, or the GPU beside the target; many a machine is faster in turns.
            yield PipelineEntry(ONE_DEVICE, strategy, placement="shared")
    if plan.core_ml_draft:
        yield PipelineEntry(CORE_ML_DRAFT, "adaptive", "coreml")
    if adaptive:
        yield PipelineEntry(WITHOUT_LOOKUP, "adaptive", lookup=False)
        yield PipelineEntry(LOOKUP_ALONE, "adaptive", "ngram")
        if not trained:
            yield PipelineEntry(BLIND_DRAFT, "adaptive", "random")


def _chain_lengths(plan: BenchPlan, strategy: str) -> tuple[int | None, ...]:
    """K of every contender of this line."""
    return plan.draft_tokens if strategy in CHAINS and plan.draft_tokens else (None,)


_KV_BYTES = 1 << 30
"""Of each line, for the KV of some thousand tokens and freed buffers."""
IN_TURNS = (
    "The models of all contenders do not fit into the memory that macOS recommends for the GPU. So each contender is "
    "measured alone, after the one before: a machine that grows warm slows the later ones. Compare fewer strategies "
    "or smaller models to measure them alternately."
)

OnStart = Callable[[str], None]
"""Called with the name of a line that starts."""
AwaitContenders = Callable[[], list[Contender]]
"""Waits until the models of a line are loaded; its contenders are then idle."""


class BenchLine(NamedTuple):
    weights: int
    """Bytes of the models that its processes hold."""
    start: Callable[[], AbstractContextManager[AwaitContenders]]
    """Starts the processes; they end with the context."""


def groups(lines: Sequence[BenchLine], working_set: int) -> list[list[BenchLine]]:
    """The lines that are resident together, group after group. `working_set`: bytes for models; 0 if unlimited."""
    needed = sum(line.weights + _KV_BYTES for line in lines)
    return [[line] for line in lines] if 0 < working_set < needed else [list(lines)]


@contextmanager
def resident(group: Sequence[BenchLine]) -> Iterator[list[Contender]]:
    """The contenders of these lines, loaded and idle, in the order of the lines."""
    with ExitStack() as stack:
        started = [stack.enter_context(line.start()) for line in group]
        yield [contender for await_contenders in started for contender in await_contenders()]


def bench_lines(
    plan: BenchPlan, longest: int, on_start: OnStart, on_absent: OnRivalAbsent, recorded: Path | None = None
) -> list[BenchLine]:
    """Every line of the plan: mlx-lm, then ours, then rivals.

    A pipeline raises InputError at its start if the target's context has no room for a prompt of `longest` tokens and
    its continuation. `recorded`: file of the target's texts, which every contender replays.
    """
    models = plan.models()
    target = 0 if recorded is not None else ModelFolder(models.target).size
    draft = ModelFolder(models.draft).size
    counts = () if models.trained else plan.draft_tokens
    profile = None if plan.pace is None else load_profile(plan.pace)
    return [
        BenchLine(target + (draft if counts else 0), partial(_baseline, counts, models, profile, on_start, recorded)),
        *(
            BenchLine(
                target + models.draft_bytes(entry.strategy, entry.engine),
                partial(_pipeline, entry, plan, models, longest, on_start, recorded),
            )
            for entry in entries(plan, trained=models.trained, gpu=computes_on_gpu())
        ),
        *([BenchLine(target, partial(_rival, plan, models, on_start, on_absent))] if plan.rivals else []),
    ]


@contextmanager
def _baseline(
    counts: Sequence[int],
    models: BenchModels,
    profile: DeviceProfile | None,
    on_start: OnStart,
    recorded: Path | None,
) -> Iterator[AwaitContenders]:
    """mlx-lm's plain decoding and its speculative decoding for each K of `counts`, on all cores."""
    draft = str(models.draft) if counts else ""
    with running(str(models.target), draft, profile, recorded) as process:

        def ready() -> list[Contender]:
            on_start(PLAIN)
            process.await_ready()
            ends = sorted(TextCodec(models.target).eos)
            return [MlxLmContender(process, count, ends) for count in (0, *counts)]

        yield ready


@contextmanager
def _pipeline(
    entry: PipelineEntry,
    plan: BenchPlan,
    models: BenchModels,
    longest: int,
    on_start: OnStart,
    recorded: Path | None,
) -> Iterator[AwaitContenders]:
    on_start(entry.line)
    # Without arenas: mlx-lm prefills a repeated prompt again, so our target must too.
    with Pipeline(
        settings=entry.settings(models),
        target_texts="" if recorded is None else str(recorded),
        pace=plan.pace,
        arena_memory=0,
    ) as pipeline:
        _require_room(pipeline.state().context, longest, plan.max_tokens)
        contenders: list[Contender] = [
            PipelineContender(contender_name(entry.line, count), pipeline, count) for count in entry.draft_tokens
        ]
        yield lambda: contenders


@contextmanager
def _rival(
    plan: BenchPlan, models: BenchModels, on_start: OnStart, on_absent: OnRivalAbsent
) -> Iterator[AwaitContenders]:
    with ExitStack() as stack:
        contenders: list[LlamaCppContender] = []
        if plan.pace is not None:
            on_absent(LLAMA_CPP, PACED)
        else:
            contenders += open_llama_cpp(plan.target, models.target, stack, on_start, on_absent)
        yield lambda: [*contenders]


def _require_room(context: int, longest: int, max_tokens: int) -> None:
    if longest + max_tokens > context:
        raise InputError(
            f"The longest prompt has {longest:,} tokens and the target a context of {context:,}: there is no room for "
            f"{max_tokens:,} more. Lower --max-tokens, or choose shorter prompts."
        )


WARM_UP_TOKENS = 16
"""Generated by each contender at each temperature before anything is measured."""


def run(
    plan: BenchPlan,
    requests: Sequence[BenchRequest],
    watch: Listener,
    on_absent: OnRivalAbsent,
    recorded: Path | None = None,
) -> tuple[list[Measurement], list[str]]:
    """All measurements, and the contenders' names in the order of the table. `recorded`: file of the target's texts,
    which every contender replays."""
    longest = max(len(request.tokens) for request in requests)
    lines = bench_lines(plan, longest, watch.starting, on_absent, recorded)
    slow_motion = 1.0 if plan.pace is None else load_profile(plan.pace).slow_motion
    measurements: list[Measurement] = []
    names: list[str] = []
    together = groups(lines, gpu_working_set())
    if len(together) > 1:
        watch.note(IN_TURNS)
    for group in together:
        with resident(group) as contenders:
            if slow_motion != 1.0:
                contenders = [InDeviceTime(contender, slow_motion) for contender in contenders]
            names += [contender.name for contender in contenders]
            watch.total(len(names) * len(plan.temperatures) * plan.repeats * len(requests))
            # A rival that can't run has no contenders.
            if contenders:
                measurements += measured(contenders, requests, plan, watch.finished)
    return measurements, names


Start = dict[str, float | None]
"""Seconds, by part."""


def starts(plan: BenchPlan, tokens: tuple[int, ...], watch: Listener) -> dict[str, Start]:
    """mlx-lm's start and ours, one after the other; without mlx-lm's where it could not be made. `tokens`: a prompt.
    Raises as a pipeline does."""
    models, found, first = plan.models(), dict[str, Start](), GenerationTask(tokens, 1, 0.0, 0)
    watch.begin(2, "mlx-lm and adaptive, to time their starts")
    began = perf_counter()
    with suppress(PipelineError), running(str(models.target), "", tokenizer=True) as process:
        parts, ready = process.await_ready(), perf_counter() - began
        generation = MlxLmContender(process, 0, ()).generate(first)
        found[PLAIN] = {**parts, "ready": ready, "first token": generation.time_to_first_token}
    watch.finished(PLAIN)
    began = perf_counter()
    with Pipeline(settings=models.settings("adaptive")) as pipeline:
        parts, ready = dict(pipeline.state().start), perf_counter() - began
        generation = PipelineContender("", pipeline).generate(first)
        found["adaptive"] = {**parts, "ready": ready, "first token": generation.time_to_first_token}
    watch.finished("adaptive")
    return found


def encoded(prompts: Sequence[BenchPrompt], plan: BenchPlan) -> list[tuple[int, ...]]:
    """The first turns of the prompts as the target's tokens. Raises InputError for one without any."""
    target = plan.models().target
    codec = TextCodec(target)
    tokens = [
        tuple(chat_prompt(str(target), prompt.text) if prompt.chat else codec.encode(prompt.text)) for prompt in prompts
    ]
    if not all(tokens):
        raise InputError("A prompt has no tokens: give every line of the prompts at least one word.")
    return tokens


def requests_of(prompts: Sequence[BenchPrompt], plan: BenchPlan, watch: Listener) -> list[BenchRequest]:
    """A request for every turn of the prompts.

    Before a later turn stands the target's own answer to the turn before it, at temperature 0 and of at most
    `max_tokens`. So every contender and every temperature has the same requests. Raises InputError for a prompt
    without tokens.
    """
    found = [
        BenchRequest(tokens, index, 0, prompt.category)
        for index, (prompt, tokens) in enumerate(zip(prompts, encoded(prompts, plan), strict=True))
    ]
    answers = sum(len(prompt.later) for prompt in prompts)
    if not answers:
        return found
    watch.begin(answers, "the target, to answer the first turns")
    models = plan.models()
    target = str(models.target)
    with Pipeline(settings=models.settings("adaptive")) as pipeline:
        for first in tuple(found):
            prompt, tokens = prompts[first.prompt], first.tokens
            conversation = [{"role": "user", "content": prompt.text}]
            for turn, message in enumerate(prompt.later, start=1):
                answer = pipeline.generate(tokens, SamplingParams(temperature=0, max_tokens=plan.max_tokens)).text
                conversation += [{"role": "assistant", "content": answer}, {"role": "user", "content": message}]
                tokens = tuple(chat_prompt(target, conversation))
                found.append(BenchRequest(tokens, first.prompt, turn, prompt.category))
                watch.finished("Answering the first turns")
    return sorted(found, key=lambda request: (request.prompt, request.turn))


def measured(
    contenders: Sequence[Contender],
    requests: Sequence[BenchRequest],
    plan: BenchPlan,
    on_generation: Callable[[str], None],
) -> list[Measurement]:
    """Warm up every contender, then measure one generation at a time: the other contenders are idle."""
    for temperature in plan.temperatures:
        for contender in contenders:
            contender.generate(GenerationTask(requests[0].tokens, min(WARM_UP_TOKENS, plan.max_tokens), temperature, 0))
    measurements = []
    for (setting, tokens), contender in schedule(contenders, settings(plan.repeats, requests, plan.temperatures)):
        task = GenerationTask(tokens, plan.max_tokens, setting.temperature, setting.seed)
        generation = contender.generate(task)
        measurements.append(Measurement(setting, contender.name, contender.family, generation))
        on_generation(contender.name)
    return measurements
