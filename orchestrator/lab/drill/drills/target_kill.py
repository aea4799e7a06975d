"""The target is killed: requests go on from their committed tokens, and a target that keeps dying is given up."""

import os
import random
import re
import signal
from contextlib import suppress

from orchestrator.api.client import Client
from orchestrator.api.pipeline import Pipeline
from orchestrator.api.sampling import SamplingParams
from orchestrator.lab.drill.drill_requests import DelayedFault, drill_requests, serve, wrong
from orchestrator.lab.drill.outcome import DrillOutcome, OnStep, left_behind, milliseconds, spread
from orchestrator.lab.drill.processes import mark, members, remains, until
from protocol.errors import PipelineError

PROMISE = "target killed: requests go on, no token lost or doubled; three deaths a minute end with a sentence"
_KILLS = 2
"""Kills that a pipeline survives within a minute."""
_SENTENCE = re.compile(r"The target worker ended by signal 9\..*three times within a minute.*doctor")
_STRATEGIES = ("adaptive", "ar", "ssd")


def run(count: int, seed: int, on_step: OnStep) -> DrillOutcome:
    """Kill `count` targets, two a pipeline, each at a random moment of a request; a third kill ends the pipeline."""
    source = random.Random(seed)
    requests = drill_requests(seed)
    failures: list[str] = []
    gaps: list[float] = []
    opened = done = 0
    while done < count:
        with Pipeline(draft_engine="mlx", strategy=_STRATEGIES[opened % len(_STRATEGIES)]) as pipeline:
            request, when = source.choice(requests), f"seed {seed}, pipeline {opened}"
            undisturbed = serve(pipeline, request)
            failures += wrong(request, undisturbed, f"{when}, undisturbed")
            killed: set[int] = set()
            for number in range(min(_KILLS, count - done)):
                pid = _fresh_target(pipeline, killed)
                fault = DelayedFault(source.uniform(0.0, undisturbed.seconds), lambda pid=pid: _kill(pid))
                served = serve(pipeline, request)
                gap = served.longest_gap(since=fault.done())
                gaps += [] if gap is None else [gap]
                failures += wrong(request, served, f"{when}, kill {number}")
                done += 1
                on_step()
            if len(killed) == _KILLS:
                failures += [f"{when}: {text}" for text in _third_kill(pipeline, killed)]
            place = mark(pipeline.address)
        failures += left_behind(when, remains(place))
        opened += 1
    measured = f"{done} kills, {len(failures)} failures; resumed after p50 / p99 / max {milliseconds(gaps)}"
    return DrillOutcome(PROMISE, measured, failures, (), {"kills": done, "breakers": opened, **spread("resume", gaps)})


def _fresh_target(pipeline: Pipeline, killed: set[int]) -> int:
    """The process id of a target that was not killed before; it is added to `killed`."""
    place = mark(pipeline.address)
    pid = until(lambda: {members(place).get("target_worker", 0)} - killed - {0}).pop()
    killed.add(pid)
    return pid


def _third_kill(pipeline: Pipeline, killed: set[int]) -> list[str]:
    """Kill the third target; a sentence for each wrong error, of the running request and of a later one."""
    pid = _fresh_target(pipeline, killed)
    fault = DelayedFault(0.05, lambda: _kill(pid))
    texts = [_error_of(pipeline, 2000)]
    fault.done()
    texts.append(_error_of(Client(pipeline.address), 4))
    return [f"the third death was answered with {text!r}" for text in texts if not _SENTENCE.search(text)]


def _error_of(client: Client, max_tokens: int) -> str:
    try:
        client.generate("import os", SamplingParams(temperature=0.0, max_tokens=max_tokens))
    except PipelineError as error:
        return str(error)
    return "an answer"


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
