"""The draft stops at a random moment: the target goes on without it, and with it when it wakes."""

import os
import random
import signal

from orchestrator.api.pipeline import Pipeline
from orchestrator.tools.drill.exchange import Shot, ask, questions, wrong
from orchestrator.tools.drill.outcome import DrillOutcome, OnStep, milliseconds, spread, too_late
from orchestrator.tools.drill.processes import mark, members, remains

PROMISE = "draft stopped (SIGSTOP): same tokens, the target goes on within 250 ms"
_FALLBACK = 0.25
_STRATEGIES = ("adaptive", "ssd", "sd")


def run(count: int, seed: int, on_step: OnStep) -> DrillOutcome:
    """Stop the draft in `count` requests; it wakes up when the request is over."""
    source = random.Random(seed)  # noqa: S311 - no secret
    known = questions(seed)
    failures: list[str] = []
    late: list[str] = []
    gaps: list[float] = []
    for index, strategy in enumerate(_STRATEGIES):
        # The strategies share the count, the first ones get what is over.
        share = (count + len(_STRATEGIES) - 1 - index) // len(_STRATEGIES)
        if not share:
            continue
        with Pipeline(strategy=strategy) as pipeline:
            place = mark(pipeline.address)
            pid = members(place)["draft_worker"]
            for number in range(share):
                question = source.choice(known)
                length = ask(pipeline, question).seconds
                stop = Shot(source.uniform(0.0, length), lambda pid=pid: os.kill(pid, signal.SIGSTOP))
                exchange = ask(pipeline, question)
                stall = exchange.stall(since=stop.done())
                os.kill(pid, signal.SIGCONT)
                when = f"seed {seed}, {strategy}, stop {number}"
                failures += wrong(question, exchange, when)
                if stall is not None:
                    gaps.append(stall)
                    late += too_late(f"{when}: going on", stall, _FALLBACK)
                on_step()
        failures += [f"seed {seed}, {strategy}: {left} was left behind." for left in remains(place)]
    measured = f"{count} stops, {len(failures)} failures; longest gap p50 / p99 / most {milliseconds(gaps)}"
    return DrillOutcome(PROMISE, measured, failures, late, {"stops": count, **spread("gap", gaps)})
