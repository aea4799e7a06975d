"""What the device waits for between two rounds, by the host's clock, beside mlx-lm's own loop.

MLX tells no times of Metal's command buffers, and the driver's utilisation is too coarse for milliseconds. A loop that
dispatches each forward before it awaits the last one leaves no gap, so what another loop takes longer is idle time.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from orchestrator.api.pipeline import Pipeline
from orchestrator.lab.bench.contender import GenerationTask, PipelineContender, TimedGeneration
from orchestrator.lab.bench.models import BenchModels
from orchestrator.lab.bench.names import AUTOREGRESSIVE
from orchestrator.lab.bench.trials import encoded
from orchestrator.lab.findings import Field, Findings, tabulated
from orchestrator.lab.first_light.forwards import ForwardOrder, Loop, LoopTimed, examined
from orchestrator.lab.first_light.pipelines import measured_pair, plan, prompts
from orchestrator.lab.first_light.stages import Asked

_PROMPT = 32
_LOOPS: Mapping[Loop, str] = {
    "mlx-lm": "mlx-lm's own loop",
    "waited": "our forwards, each awaited before the next is built",
    "ahead": "our forwards, the next dispatched before the last is awaited",
}
_NOTE = (
    "By the host's clock. idle: beyond the same forwards dispatched ahead, whose device has always work. messages: of "
    "it, from the end of a forward to the begin of the next one, in the pipeline. Rounds of adaptive have several "
    "widths: their idle time is that of a tree of five, and the messages."
)


class _Row(NamedTuple):
    """Milliseconds of a round; None: there is no such figure."""

    loop: str
    tokens: str
    round: float
    idle: float | None
    messages: float | None = None
    busy: float | None = None
    """The target's, as the pipeline counts it: a forward that is being built is one."""


def measure(asked: Asked) -> Findings:
    ours = plan()
    models = ours.models()
    texts = encoded(prompts(models, asked.sized(1, 3)), ours)
    asked.notice("loops over forwards")
    order = ForwardOrder(folder=str(models.target), tokens=texts[0], prompt=_PROMPT, rounds=asked.sized(8, 128))
    loops: dict[tuple[Loop, int], float] = {
        (one.loop, one.width): one.milliseconds for one in examined(order) if isinstance(one, LoopTimed)
    }
    tasks = [GenerationTask(tokens, asked.sized(16, 96), 0.0, 0) for tokens in texts]
    pipelines: dict[str, TimedGeneration] = {}
    for strategy in (AUTOREGRESSIVE, "adaptive"):
        asked.notice(f"{strategy}, loading models")
        pipelines[strategy] = _last_decoded(models, strategy, tasks)
    return findings(loops, pipelines, measured_pair(models))


def _last_decoded(models: BenchModels, strategy: str, tasks: Sequence[GenerationTask]) -> TimedGeneration:
    """The last of these texts, when the pipeline knows its costs."""
    with Pipeline(settings=models.settings(strategy), arena_memory=0) as pipeline:
        contender = PipelineContender(strategy, pipeline)
        return [contender.generate(task) for task in tasks][-1]


def findings(
    loops: Mapping[tuple[Loop, int], float], pipelines: Mapping[str, TimedGeneration], notes: Sequence[str]
) -> Findings:
    """`loops`: milliseconds of a round by loop and width. `pipelines`: by strategy."""
    gaps = {width: max(0.0, loops["waited", width] - loops["ahead", width]) for loop, width in loops if loop == "ahead"}
    rows = [
        _Row(_LOOPS[loop], str(width), time, gaps[width] if loop == "waited" else None)
        for (loop, width), time in loops.items()
    ]
    stock, ahead = loops["mlx-lm", 1], loops["ahead", 1]
    settled: list[str] = []
    for strategy, timed in pipelines.items():
        plain = strategy == AUTOREGRESSIVE
        round = 1e3 * timed.tokens_per_round / timed.tokens_per_second
        messages = 1e3 * (timed.overhead_per_round or 0.0)
        idle = max(0.0, round - ahead) if plain else gaps[max(gaps)] + messages
        rows.append(
            _Row(f"pipeline, {strategy}", "1" if plain else "several", round, idle, messages, timed.target_busy)
        )
        if plain:
            settled.append(
                f"Plain rounds: the pipeline takes {round:.2f} ms a token and mlx-lm's own loop {stock:.2f} ms, "
                f"{stock / round:.2f} of its speed; the device is idle for {idle:.2f} ms of each round."
            )
        else:
            settled.append(
                f"Rounds with guesses: the device is idle for {idle:.2f} of {round:.2f} ms a round, {messages:.2f} ms "
                f"for messages and decisions and {idle - messages:.2f} ms while the forward is built."
            )
    fields: list[Field[_Row]] = [
        Field("loop", lambda row: row.loop),
        Field("tokens", lambda row: row.tokens),
        Field("ms a round", lambda row: row.round, ".2f"),
        Field("idle, ms", lambda row: row.idle, ".2f"),
        Field("messages, ms", lambda row: row.messages, ".2f"),
        Field("target busy", lambda row: row.busy, ".2f"),
    ]
    return Findings(
        tables=(tabulated("Rounds and what the device waits for", fields, rows, note=_NOTE),),
        settled=tuple(settled),
        notes=tuple(notes),
    )
