"""Records what the target generates for the requests of a bench, once, in this user's cache. Prints nothing."""

import hashlib
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from orchestrator.api.pipeline import Pipeline
from orchestrator.lab.bench.contender import GenerationTask
from orchestrator.lab.bench.measurement import BenchRequest, settings
from orchestrator.lab.bench.plan import BenchPlan
from orchestrator.machine.cache_entries import made_once
from protocol.contracts.engines import NO_DRAFT
from protocol.contracts.model_fingerprint import model_fingerprint
from protocol.errors import PipelineError
from protocol.messages.client import PipelineState
from protocol.own_modules import module_command
from protocol.paths import cache_folder
from protocol.worker.recorded_texts import RecordedTarget, RecordedText, RecordedTexts

_FILE = "texts.jsonl"


def recorded(plan: BenchPlan, requests: Sequence[BenchRequest], on_text: Callable[[str], None]) -> Path:
    """The file with the text of every request of the plan. It is recorded by target-only decoding if it is absent.

    `on_text` is called after each text. The recording is complete or absent: a stopped one leaves nothing. Raises
    InputError for a recording that does not fit, PipelineError if the target fails.
    """
    target = plan.models().target
    fingerprint, tasks = model_fingerprint(target), distinct_tasks(plan, requests)
    folder = cache_folder() / "recorded-texts" / _name(fingerprint, tasks)
    path = made_once(folder, lambda unfinished: _record(target, fingerprint, tasks, on_text).write(unfinished / _FILE))
    RecordedTexts.read(path / _FILE, fingerprint)
    outputs = plan.models().outputs_read(plan.drafters)
    if outputs:
        _record_features(target, path / _FILE, outputs)
    return path / _FILE


def distinct_tasks(plan: BenchPlan, requests: Sequence[BenchRequest]) -> list[GenerationTask]:
    """The tasks of the plan, each text once: the seed has no effect at temperature 0."""
    tasks = (
        GenerationTask(tokens, plan.max_tokens, each.temperature, each.seed if each.temperature else 0)
        for each, tokens in settings(plan.repeats, requests, plan.temperatures)
    )
    return list(dict.fromkeys(tasks))


def _record(
    target: Path, fingerprint: str, tasks: Sequence[GenerationTask], on_text: Callable[[str], None]
) -> RecordedTexts:
    with Pipeline(str(target), draft_engine=NO_DRAFT, strategy="ar", arena_memory=0) as pipeline:
        state, texts = pipeline.state(), []
        for task in tasks:
            texts.append(_recorded_text(pipeline, task))
            on_text("Recording")
    return RecordedTexts(_header(state, fingerprint, len(texts)), texts)


def _recorded_text(pipeline: Pipeline, task: GenerationTask) -> RecordedText:
    tokens = pipeline.generate(task.tokens, task.sampling()).tokens
    return RecordedText(prompt=task.tokens, temperature=task.temperature, seed=task.seed, tokens=tokens)


def _header(state: PipelineState, fingerprint: str, texts: int) -> RecordedTarget:
    return RecordedTarget(
        model_fingerprint=fingerprint, vocabulary=state.vocabulary, context=state.context, texts=texts
    )


def _record_features(target: Path, texts: Path, outputs: tuple[int, ...]) -> None:
    """Raises PipelineError if the target's states can't be computed."""
    module = "target_worker.recorded"
    command = [*module_command(module), str(target), str(texts), ",".join(map(str, outputs))]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise PipelineError((ended.stderr.strip().splitlines() or [f"{module} ended"])[-1])


def _name(fingerprint: str, tasks: Sequence[GenerationTask]) -> str:
    """Another name for each target and each set of requests."""
    return hashlib.sha256(msgspec.json.encode((fingerprint, tasks))).hexdigest()[:24]
