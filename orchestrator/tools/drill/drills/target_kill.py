"""The target is killed at random moments: requests go on from their committed tokens; one that keeps dying is not
started for ever."""

import os
import random
import re
import signal
from contextlib import suppress

from orchestrator.api.client import Client
from orchestrator.api.pipeline import Pipeline
from orchestrator.api.sampling_params import SamplingParams
from orchestrator.tools.drill.exchange import Shot, ask, questions, wrong
from orchestrator.tools.drill.outcome import DrillOutcome, OnStep, milliseconds, spread
from orchestrator.tools.drill.processes import mark, members, remains, until
from protocol.errors import PipelineError

PROMISE = "target killed: requests go on, no token lost or doubled; three deaths a minute end with a sentence"
_LIVES = 2
"""Kills that a pipeline survives within a minute."""
_SENTENCE = re.compile(r"The target worker ended by signal 9\..*three times within a minute.*doctor")
_STRATEGIES = ("adaptive", "ar", "ssd")


def run(count: int, seed: int, on_step: OnStep) -> DrillOutcome:
    """Kill `count` targets, two a pipeline, each somewhere in a request; each pipeline's third ends it."""
    source = random.Random(seed)  # noqa: S311 - no secret
    known = questions(seed)
    failures: list[str] = []
    stalls: list[float] = []
    opened = done = 0
    while done < count:
        with Pipeline(strategy=_STRATEGIES[opened % len(_STRATEGIES)]) as pipeline:
            question, when = source.choice(known), f"seed {seed}, pipeline {opened}"
            undisturbed = ask(pipeline, question)
            failures += wrong(question, undisturbed, f"{when}, undisturbed")
            shot: set[int] = set()
            for life in range(min(_LIVES, count - done)):
                pid = _fresh_target(pipeline, shot)
                bullet = Shot(source.uniform(0.0, undisturbed.seconds), lambda pid=pid: _kill(pid))
                exchange = ask(pipeline, question)
                stall = exchange.stall(since=bullet.done())
                stalls += [] if stall is None else [stall]
                failures += wrong(question, exchange, f"{when}, kill {life}")
                done += 1
                on_step()
            if len(shot) == _LIVES:
                failures += [f"{when}: {text}" for text in _broken(pipeline, shot)]
            place = mark(pipeline.address)
        failures += [f"{when}: {left} was left behind." for left in remains(place)]
        opened += 1
    measured = f"{done} kills, {len(failures)} failures; until it went on p50 / p99 / most {milliseconds(stalls)}"
    return DrillOutcome(
        PROMISE, measured, failures, (), {"kills": done, "breakers": opened, **spread("resume", stalls)}
    )


def _fresh_target(pipeline: Pipeline, shot: set[int]) -> int:
    """The process id of a target that was not shot before; it is noted as shot."""
    place = mark(pipeline.address)
    pid = until(lambda: {members(place).get("target_worker", 0)} - shot - {0}).pop()
    shot.add(pid)
    return pid


def _broken(pipeline: Pipeline, shot: set[int]) -> list[str]:
    """Kill the third target; what is wrong with the error that follows, now and for whoever asks later."""
    pid = _fresh_target(pipeline, shot)
    bullet = Shot(0.05, lambda: _kill(pid))
    texts = [_error_of(pipeline, 2000)]
    bullet.done()
    texts.append(_error_of(Client(pipeline.address), 4))
    return [f"the third death was answered with {text!r}" for text in texts if not _SENTENCE.search(text)]


def _error_of(client: Client, max_tokens: int) -> str:
    try:
        client.generate("import os", SamplingParams(max_tokens=max_tokens))
    except PipelineError as error:
        return str(error)
    return "an answer"


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
