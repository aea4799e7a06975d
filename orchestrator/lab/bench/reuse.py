"""Time to the first token of an agent's turns, with and without KV of ended requests.

The conversation is synthetic: every turn resends all earlier turns and adds tokens.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from statistics import median, quantiles
from typing import Any

from orchestrator.api.pipeline import Pipeline
from orchestrator.api.sampling import UNFILTERED, SamplingParams
from orchestrator.lab.bench.figures import kept_pace
from orchestrator.lab.bench.plan import BenchPlan
from orchestrator.lab.bench.prompts import BenchPrompt
from orchestrator.lab.bench.trials import joined_tokens
from orchestrator.lab.findings import Field, Findings, Listener, tabulated
from orchestrator.lab.report import machine_lines
from orchestrator.machine.check import Check
from protocol.errors import InputError
from protocol.messages.client import Statistics

CONTENDERS: dict[str, dict[str, Any]] = {
    "no reuse": {"arena_memory": 0},
    "shared memory alone": {"prefix_cache_memory": 0},
    "reuse": {},
}
"""Pipeline options by contender. The first contender's tokens are the reference."""
TURNS = 50
"""Of a conversation."""
_WARM_UP = 48
"""Tokens of a prompt that shares no prefix with the others."""


_MAX_FIRST = 2048
_MAX_ADDED = 512
_MIN_ADDED = 8
_MAX_ANSWER = 64


@dataclass(frozen=True, slots=True)
class TranscriptShape:
    """Lengths in tokens."""

    turns: int
    first: int
    """The first prompt: instructions and tool descriptions."""
    added: int
    """What each later turn adds after the answer: the output of a tool."""
    answer: int

    @property
    def longest(self) -> int:
        """The last turn's prompt and answer."""
        return self.first + (self.turns - 1) * (self.answer + self.added) + self.answer


def transcript_shape(context: int, turns: int, answer: int) -> TranscriptShape:
    """A shape of `turns` turns that fills the context, with answers of at most `answer` tokens.

    Raises InputError if the context has no room for so many turns.
    """
    first = min(_MAX_FIRST, context // 8)
    step = (context - first) // turns
    answer = min(answer, _MAX_ANSWER, step // 4)
    added = min(_MAX_ADDED, step - answer)
    if answer < 1 or added < _MIN_ADDED:
        most = (context - first) // (2 * _MIN_ADDED)
        raise InputError(f"The target's context of {context:,} has no room for {turns} turns: at most {most} fit.")
    return TranscriptShape(turns, first, added, answer)


class Transcript:
    """One conversation made of a text's tokens; every `number` gives another one."""

    def __init__(self, tokens: Sequence[int], shape: TranscriptShape, number: int) -> None:
        self._text = islice(cycle(tokens), number * 997 % len(tokens), None)
        self._shape = shape
        self.prompt = list(islice(self._text, shape.first))

    def add_turn(self, answer: Sequence[int]) -> None:
        """Extend `prompt` to the next turn's prompt."""
        self.prompt += [*answer, *islice(self._text, self._shape.added)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One prompt of one contender."""

    contender: str
    repeat: int
    number: int
    exact: bool
    statistics: Statistics


def measure(plan: BenchPlan, prompts: Sequence[BenchPrompt], watch: Listener) -> Findings:
    """Every turn of every contender, interleaved."""
    tokens = joined_tokens(prompts, plan)
    measured: list[Turn] = []
    models = plan.models()
    watch.begin(plan.repeats * TURNS * len(CONTENDERS), "the pipelines")
    settings = models.settings("adaptive").changed(pace=plan.pace)
    with ExitStack() as stack:
        pipelines = {
            name: stack.enter_context(Pipeline(settings=settings, **options)) for name, options in CONTENDERS.items()
        }
        shape = transcript_shape(pipelines["reuse"].state().context, TURNS, plan.max_tokens)
        _warm_up(pipelines, tokens, plan)
        for repeat in range(plan.repeats):
            for turn in _conversation(pipelines, Transcript(tokens, shape, repeat), shape, plan, repeat):
                measured.append(turn)
                watch.finished(f"turn {turn.number}, {turn.contender}")
    return findings(measured, shape, plan)


_MEANINGS = """\
first token: milliseconds from the request's arrival at the orchestrator. Median, 90th percentile, last turn; without \
the first turn, which has nothing to reuse. evaluated: prompt tokens that the target evaluated. exact: the tokens are \
those without reuse. shared memory alone: the target adopts arenas; the draft prefills every prompt."""
_FIELDS: tuple[Field[dict[str, Any]], ...] = (
    Field("", lambda row: row["contender"] + ("" if row["representative"] else " (INVALID)")),
    Field("first token", lambda row: row["first_token"], ",.0f", scale=1e3),
    Field("p90", lambda row: row["first_token_p90"], ",.0f", scale=1e3),
    Field("last", lambda row: row["first_token_last"], ",.0f", scale=1e3),
    Field("evaluated", lambda row: row["evaluated"], ",d"),
    Field("exact", lambda row: "yes" if row["exact"] else "NO"),
)


def findings(turns: Sequence[Turn], shape: TranscriptShape, plan: BenchPlan) -> Findings:
    """A row a contender."""
    by_name = {name: [turn for turn in turns if turn.contender == name] for name in CONTENDERS}
    results = [summary(mine) for mine in by_name.values()]
    pace = f" Paced as {plan.pace}." if plan.pace else ""
    scope = (
        f"{shape.turns} turns: {shape.first:,} tokens, then {shape.added} more after each answer of {shape.answer}, "
        f"up to {shape.longest:,}; temperature {plan.temperatures[0]:g}, {plan.repeats} repeats.{pace}"
    )
    wrong = (
        Check(f"{turn.contender}, turn {turn.number}", "fail", "the tokens differ from those without reuse")
        for turn in turns
        if not turn.exact
    )
    late = (
        Check(
            name,
            "warn",
            "invalid: more than 1% of its forwards took longer than the profile's device would",
            "use a quieter machine, or a slower profile",
        )
        for name, mine in by_name.items()
        if not turns_kept_pace(mine)
    )
    return Findings(
        title="the turns of an agent",
        conditions=(scope, *machine_lines()),
        tables=(tabulated("", _FIELDS, results, wrong=lambda row: not row["representative"]),),
        checks=(*wrong, *late),
        notes=(_MEANINGS,),
        figures={
            "machine": machine_lines(),
            "settings": asdict(plan),
            "shape": {**asdict(shape), "longest": shape.longest},
            "results": results,
            "turns": turns,
        },
    )


def summary(turns: Sequence[Turn]) -> dict[str, Any]:
    """Figures of one contender's turns without the first turn. Times in seconds."""
    later = [turn for turn in turns if turn.number > 1]
    last = max(turn.number for turn in turns)
    firsts = [turn.statistics.time_to_first_token for turn in later]
    adopted = sum(turn.statistics.adopted_tokens for turn in later)
    return {
        "contender": turns[0].contender,
        "first_token": median(firsts),
        "first_token_p90": quantiles(firsts, n=10)[-1] if len(firsts) > 1 else firsts[0],
        "first_token_last": median(turn.statistics.time_to_first_token for turn in later if turn.number == last),
        "evaluated": sum(turn.statistics.prompt_tokens - 1 for turn in later) - adopted,
        "adopted": adopted,
        "exact": all(turn.exact for turn in turns),
        "representative": turns_kept_pace(turns),
    }


def turns_kept_pace(turns: Sequence[Turn]) -> bool:
    """Whether the turns are valid for the profile's device."""
    return kept_pace(turn.statistics.pace for turn in turns)


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
            yield Turn(
                contender=name,
                repeat=repeat,
                number=number,
                exact=answers[name].tokens == expected,
                statistics=answers[name].statistics,
            )
        transcript.add_turn(expected)
