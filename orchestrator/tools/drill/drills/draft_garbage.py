"""The draft sends garbage: the tokens are the target's own, and the target is hardly held up."""

import random
import sys

from orchestrator.api.pipeline import Pipeline
from orchestrator.tools.drill.exchange import ask, questions, wrong
from orchestrator.tools.drill.garbage_draft import MODES
from orchestrator.tools.drill.outcome import DrillOutcome, OnStep, milliseconds, spread, too_late
from orchestrator.tools.drill.processes import mark, remains

PROMISE = "draft sends garbage: same tokens, the target goes on within 250 ms"
_FALLBACK = 0.25
_STRATEGIES = ("adaptive", "ssd", "adaptive", "sd")


def run(count: int, seed: int, on_step: OnStep) -> DrillOutcome:
    """`count` requests in all, some to a pipeline of every kind of garbage."""
    source = random.Random(seed)  # noqa: S311 - no secret
    known = questions(seed)
    failures: list[str] = []
    late: list[str] = []
    gaps: list[float] = []
    modes = list(MODES)
    source.shuffle(modes)
    for index, mode in enumerate(modes):
        share = (count + len(modes) - 1 - index) // len(modes)
        if not share:
            continue
        command = (sys.executable, "-m", "orchestrator.tools.drill.garbage_draft", mode)
        with Pipeline(strategy=_STRATEGIES[index % len(_STRATEGIES)], draft_command=command) as pipeline:
            for number in range(share):
                question = source.choice(known)
                exchange = ask(pipeline, question)
                when = f"seed {seed}, {mode}, request {number}"
                failures += wrong(question, exchange, when)
                if exchange.arrivals:
                    gaps.append(max(exchange.gaps(), default=0.0))
                    late += too_late(f"{when}: going on", gaps[-1], _FALLBACK)
                on_step()
            place = mark(pipeline.address)
        failures += [f"seed {seed}, {mode}: {left} was left behind." for left in remains(place)]
    measured = f"{count} requests, {len(failures)} failures; longest gap p50 / p99 / most {milliseconds(gaps)}"
    return DrillOutcome(PROMISE, measured, failures, late, {"requests": count, **spread("gap", gaps)})
