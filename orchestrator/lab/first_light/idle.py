"""What the device waits for between two rounds, by the host's clock, beside mlx-lm's own loop.

MLX tells no times of Metal's command buffers, and the driver's utilisation is too coarse for milliseconds. A loop that
dispatches each forward before it awaits the last one leaves no gap, so what another loop takes longer is idle time.
"""

from collections.abc import Mapping, Sequence

from orchestrator.api.pipeline import Pipeline
from orchestrator.lab.bench.contender import AUTOREGRESSIVE, GenerationTask
from orchestrator.lab.bench.trials import encoded
from orchestrator.lab.findings import Answer, Cell, Column, Findings, Table
from orchestrator.lab.first_light.pipelines import measured_pair, plan, prompts
from orchestrator.lab.first_light.stages import Asked
from orchestrator.lab.forwards import ForwardOrder, Loop, LoopTimed, examined
from protocol.messages.client import Statistics

_PROMPT, _HELD = 32, 4096
"""Tokens of the prompt of a loop, and of one whose KV is large enough to see copies of it."""
_LOOPS: Mapping[Loop, str] = {
    "mlx-lm": "mlx-lm's own loop",
    "waited": "our forwards, each awaited before the next is built",
    "unstaged": "the same, no layer dispatched before the forward is built",
    "ahead": "our forwards, the next dispatched before the last is awaited",
}
_NOTE = (
    "By the host's clock. idle: beyond the same forwards dispatched ahead, whose device has always work. messages: of "
    "it, from the end of a forward to the begin of the next one, in the pipeline. Rounds of adaptive have several "
    "widths: their idle time is that of a tree of five, and the messages."
)


def measure(asked: Asked) -> Findings:
    ours = plan()
    models = ours.models()
    texts = encoded(prompts(models, asked.sized(1, 3)), ours)
    asked.notice("loops over forwards")
    order = ForwardOrder(
        folder=str(models.target), tokens=texts[0], prompt=_PROMPT, rounds=asked.sized(8, 128), contexts=(_HELD,)
    )
    looped = [one for one in examined(order) if isinstance(one, LoopTimed)]
    tasks = [GenerationTask(tokens, asked.sized(16, 96), 0.0, 0) for tokens in texts]
    pipelines: dict[str, Statistics] = {}
    for strategy in (AUTOREGRESSIVE, "adaptive"):
        asked.notice(f"{strategy}, loading models")
        with Pipeline(settings=models.settings(strategy), arena_memory=0) as pipeline:
            # The last of the texts counts: the pipeline then knows its costs.
            for task in tasks:
                pipelines[strategy] = pipeline.generate(task.tokens, task.sampling()).statistics
    return findings(looped, pipelines, measured_pair(models))


def findings(looped: Sequence[LoopTimed], pipelines: Mapping[str, Statistics], notes: Sequence[str]) -> Findings:
    """`pipelines`: by strategy."""
    loops: dict[tuple[Loop, int], float] = {
        (one.loop, one.width): one.milliseconds for one in looped if not one.context
    }
    gaps = {width: max(0.0, loops["waited", width] - loops["ahead", width]) for loop, width in loops if loop == "ahead"}
    rows: list[tuple[Cell, ...]] = [
        (_LOOPS[loop], str(width), time, gaps[width] if loop == "waited" else None, None, None)
        for (loop, width), time in loops.items()
    ]
    stock, ahead = loops["mlx-lm", 1], loops["ahead", 1]
    answers: list[Answer] = [_staged(loops), _copies(looped)]
    for strategy, timed in pipelines.items():
        plain = strategy == AUTOREGRESSIVE
        round = 1e3 * timed.tokens_per_round / timed.tokens_per_second
        messages = 1e3 * timed.overhead_per_round
        idle = max(0.0, round - ahead) if plain else gaps[max(gaps)] + messages
        # The target's busy time is the pipeline's: a forward that is being built is one.
        width, busy = "1" if plain else "several", timed.target_busy
        rows.append((f"pipeline, {strategy}", width, round, idle, messages, busy))
        if plain:
            answers.append(
                Answer(
                    "plain rounds",
                    f"Plain rounds: the pipeline takes {round:.2f} ms a token and mlx-lm's own loop {stock:.2f} ms, "
                    f"{stock / round:.2f} of its speed; the device is idle for {idle:.2f} ms of each round.",
                )
            )
        else:
            answers.append(
                Answer(
                    "rounds with guesses",
                    f"Rounds with guesses: the device is idle for {idle:.2f} of {round:.2f} ms a round, {messages:.2f} "
                    f"ms for messages and decisions and {idle - messages:.2f} ms while the forward is built.",
                )
            )
    figures = ("ms a round", "idle, ms", "messages, ms", "target busy")
    columns = ("loop", "tokens", *(Column(title, ".2f") for title in figures))
    return Findings(
        tables=(Table("Rounds and what the device waits for", columns, tuple(rows), _NOTE),),
        answers=tuple(answers),
        notes=tuple(notes),
    )


def _staged(loops: Mapping[tuple[Loop, int], float]) -> Answer:
    told = [
        f"a forward of {width} that is awaited takes {loops['waited', width]:.2f} ms, and {time:.2f} ms without it"
        for (loop, width), time in loops.items()
        if loop == "unstaged"
    ]
    return Answer("staged dispatch", f"Staged dispatch: {'; '.join(told) or 'not asked, a processor has none'}.")


def _copies(looped: Sequence[LoopTimed]) -> Answer:
    most = {one.loop: one.memory for one in looped if one.context}
    text = f"Copies of KV: not asked, this target has no context of {_HELD:,} tokens."
    if most:
        text = (
            f"Rounds behind {_HELD:,} tokens take at most {most['ahead']:.1f} MiB beyond what is held where the next "
            f"begins before the token is read, and {most['waited']:.1f} MiB where each is awaited: more is copied KV."
        )
    return Answer("copies of KV", text)
