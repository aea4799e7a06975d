"""The draft is killed at random moments: requests go on by themselves, with hardly a pause."""

import os
import random
import signal
from contextlib import suppress

from orchestrator.api.pipeline import Pipeline
from orchestrator.tools.drill.exchange import DrillRequest, Exchange, Shot, added, ask, questions, typical_step, wrong
from orchestrator.tools.drill.outcome import DrillOutcome, OnStep, milliseconds, percentile, spread, too_late
from orchestrator.tools.drill.processes import mark, members, remains, until

PROMISE = "draft killed: no request fails, same tokens, ≤ one target step + 100 ms added at p99"
_LIVES = 3
"""Kills of one pipeline's draft: it is started again twice within a minute, and then done without."""
_ADDED = 0.1
"""Seconds that a death may add to the longest gap, beyond one step of the target."""
_STRATEGIES = ("adaptive", "ssd", "adaptive", "sd")


def run(count: int, seed: int, on_step: OnStep) -> DrillOutcome:
    """Kill `count` drafts, three a pipeline, each somewhere in a request."""
    source = random.Random(seed)  # noqa: S311 - no secret
    known = questions(seed)
    failures: list[str] = []
    stalls: list[float] = []
    calm: list[Exchange] = []
    opened = done = 0
    while done < count:
        question, strategy = source.choice(known), _STRATEGIES[opened % len(_STRATEGIES)]
        with Pipeline(strategy=strategy) as pipeline:
            place = mark(pipeline.address)
            undisturbed = ask(pipeline, question)
            calm.append(undisturbed)
            failures += wrong(question, undisturbed, f"seed {seed}, pipeline {opened}, undisturbed")
            shot: set[int] = set()
            for _ in range(min(_LIVES, count - done)):
                exchange, at = _killed(pipeline, question, shot, source.uniform(0.0, undisturbed.seconds))
                failures += wrong(question, exchange, f"seed {seed}, kill {done}, {strategy}")
                stalls += added([exchange.stall(since=at)], undisturbed.stall() or 0.0)
                done += 1
                on_step()
            opened += 1
        failures += [f"seed {seed}, pipeline {opened}: {left} was left behind." for left in remains(place)]
    step = typical_step(calm)
    return DrillOutcome(
        PROMISE,
        f"{done} kills, {len(failures)} failures; added p50 / p99 / most {milliseconds(stalls)}, "
        f"step {1000 * step:.0f} ms",
        failures,
        too_late("The pause at p99", percentile(stalls, 0.99), step + _ADDED),
        {"kills": done, "step_ms": round(1000 * step, 1), **spread("added", stalls)},
    )


def _killed(pipeline: Pipeline, question: DrillRequest, shot: set[int], delay: float) -> tuple[Exchange, float]:
    """A request whose draft is killed `delay` seconds after it was made, and when that was."""
    place = mark(pipeline.address)
    # One that was shot stays in the list until it is buried.
    pid = until(lambda: {members(place).get("draft_worker", 0)} - shot - {0}).pop()
    shot.add(pid)

    def kill() -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    bullet = Shot(delay, kill)
    exchange = ask(pipeline, question)
    return exchange, bullet.done()
