"""Time to the first token of an agent's turns, with and without KV of ended requests. Prints nothing."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orchestrator.api.pipeline import Pipeline
from orchestrator.api.sampling.presets import UNFILTERED
from orchestrator.api.sampling.sampling_params import SamplingParams
from orchestrator.core.events import Arrived, Submitted
from orchestrator.lab.bench.plan import BenchPlan
from orchestrator.lab.bench.prompts import BenchPrompt
from orchestrator.lab.bench.results.figures import kept_pace
from orchestrator.lab.bench.trials import joined_tokens
from orchestrator.lab.bench.workloads.transcript import Transcript, TranscriptShape, transcript_shape
from orchestrator.runtime.journal import replay
from protocol.messages.base import SequenceId
from protocol.messages.client import Pace
from protocol.messages.worker import Grow, Prefilled

CONTENDERS: dict[str, dict[str, Any]] = {
    "no reuse": {"arena_memory": 0},
    "shared memory alone": {"prefix_cache_memory": 0},
    "reuse": {},
}
"""Pipeline options by contender. The first contender's tokens are the reference."""
_WARM_UP = 48
"""Tokens of a prompt that shares no prefix with the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One prompt of one contender. Seconds count from the request's arrival at the orchestrator."""

    contender: str
    repeat: int
    number: int
    prompt_tokens: int
    first_token: float
    adopted: int
    """Prompt tokens that the target did not evaluate."""
    draft_growth: float | None = None
    """When the draft's first nodes arrived; None if the request had ended by then."""
    draft_adopted: int = 0
    exact: bool
    pace: Pace | None


@dataclass(frozen=True, slots=True)
class DraftRecord:
    """What a journal records of the draft of one request."""

    growth: float | None = None
    adopted: int = 0


def measure(
    plan: BenchPlan,
    turns: int,
    prompts: Sequence[BenchPrompt],
    on_count: Callable[[int], None],
    on_turn: Callable[[str], None],
) -> tuple[list[Turn], TranscriptShape]:
    """Every turn of every contender, interleaved; and the shape of the transcript.

    `on_count` is called with the number of turns, `on_turn` with the name of each finished turn.
    """
    tokens = joined_tokens(prompts, plan)
    measured: list[Turn] = []
    models = plan.models()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        records = {name: Path(folder) / f"{index}.jsonl" for index, name in enumerate(CONTENDERS)}
        pipelines: dict[str, Pipeline] = {}
        for name, options in CONTENDERS.items():
            pipeline = Pipeline(pace=plan.pace, record=str(records[name]), **models.pipeline("adaptive"), **options)
            pipelines[name] = stack.enter_context(pipeline)
        shape = transcript_shape(pipelines["reuse"].state().context, turns, plan.max_tokens)
        on_count(plan.repeats * turns * len(CONTENDERS))
        _warm_up(pipelines, tokens, plan)
        for repeat in range(plan.repeats):
            for turn in _conversation(pipelines, Transcript(tokens, shape, repeat), shape, plan, repeat):
                measured.append(turn)
                on_turn(f"turn {turn.number}, {turn.contender}")
        stack.close()
        return _with_drafts(measured, records), shape


def draft_records(record: Path) -> list[DraftRecord]:
    """One record for each request in a journal, in the order of arrival."""
    arrived: dict[SequenceId, float] = {}
    found: dict[SequenceId, DraftRecord] = {}
    for event, now in replay(record):
        match event:
            case Submitted(sequence):
                arrived[sequence], found[sequence] = now, DraftRecord()
            case Arrived("draft", _, Grow() as growth) if growth.sequence in found and growth.tokens:
                known = found[growth.sequence]
                if known.growth is None:
                    found[growth.sequence] = DraftRecord(now - arrived[growth.sequence], known.adopted)
            case Arrived("draft", _, Prefilled() as prefilled) if prefilled.sequence in found:
                found[prefilled.sequence] = DraftRecord(found[prefilled.sequence].growth, prefilled.adopted)
            case _:
                pass
    return list(found.values())


def turns_kept_pace(turns: Sequence[Turn]) -> bool:
    """Whether the turns are valid for the profile's device."""
    return kept_pace(turn.pace for turn in turns)


def _warm_up(pipelines: dict[str, Pipeline], tokens: Sequence[int], plan: BenchPlan) -> None:
    prompt = list(tokens[:_WARM_UP])[::-1]
    for pipeline in pipelines.values():
        pipeline.generate(
            prompt, SamplingParams(temperature=plan.temperatures[0], **UNFILTERED, seed=0, max_tokens=plan.max_tokens)
        )


def _conversation(
    pipelines: dict[str, Pipeline], transcript: Transcript, shape: TranscriptShape, plan: BenchPlan, repeat: int
) -> Iterator[Turn]:
    names = list(pipelines)
    for number in range(1, shape.turns + 1):
        params = SamplingParams(temperature=plan.temperatures[0], **UNFILTERED, seed=number, max_tokens=shape.answer)
        first = number % len(names)
        answers = {
            name: pipelines[name].generate(transcript.prompt, params) for name in (*names[first:], *names[:first])
        }
        expected = answers[names[0]].tokens
        for name in names:
            figures = answers[name].statistics
            yield Turn(
                contender=name,
                repeat=repeat,
                number=number,
                prompt_tokens=figures.prompt_tokens,
                first_token=figures.time_to_first_token,
                adopted=figures.adopted_tokens,
                exact=answers[name].tokens == expected,
                pace=figures.pace,
            )
        transcript.add_turn(expected)


def _with_drafts(turns: Sequence[Turn], records: dict[str, Path]) -> list[Turn]:
    # The first request of each contender was the warm-up.
    found = {name: iter(draft_records(record)[1:]) for name, record in records.items()}
    return [_with_draft(turn, next(found[turn.contender])) for turn in turns]


def _with_draft(turn: Turn, draft: DraftRecord) -> Turn:
    return replace(turn, draft_growth=draft.growth, draft_adopted=draft.adopted)
