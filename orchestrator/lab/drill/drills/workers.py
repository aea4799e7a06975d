"""Faults of workers: a draft that is killed, stopped or sends garbage, and a target that is killed.

Requests go on, and the tokens stay the same."""

import os
import random
import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress

from orchestrator.api.client import Client
from orchestrator.api.pipeline import Pipeline
from orchestrator.api.sampling import SamplingParams
from orchestrator.lab.drill.drill_requests import (
    DelayedFault,
    DrillRequest,
    ServedRequest,
    added,
    drill_requests,
    median_gap,
    serve,
    wrong,
)
from orchestrator.lab.drill.faulty_draft import MODES
from orchestrator.lab.drill.outcome import (
    DrillOutcome,
    OnStep,
    left_behind,
    milliseconds,
    percentile,
    spread,
    too_late,
)
from orchestrator.lab.drill.processes import mark, members, remains, until
from protocol.errors import PipelineError
from protocol.own_modules import module_command

KILL_PROMISE = "draft killed: no request fails, same tokens, ≤ one target step + 100 ms added at p99"
STOP_PROMISE = "draft stopped (SIGSTOP): same tokens, the target goes on within 250 ms"
GARBAGE_PROMISE = "draft sends garbage: same tokens, the target goes on within 250 ms"
_KILLS = 3
"""Kills of one pipeline's draft: the draft is started again twice within a minute, then the pipeline goes on alone."""
_ADDED_SECONDS = 0.1
"""Time that a kill may add to the longest gap, beyond one step of the target."""
_FALLBACK_SECONDS = 0.25
_STRATEGIES = ("adaptive", "ssd", "adaptive", "sd")


def kill_draft(count: int, seed: int, on_step: OnStep) -> DrillOutcome:
    """Kill `count` drafts, three a pipeline, each at a random moment of a request."""
    source = random.Random(seed)
    requests = drill_requests(seed)
    failures: list[str] = []
    stalls: list[float] = []
    undisturbed: list[ServedRequest] = []
    opened = done = 0
    while done < count:
        request, strategy = source.choice(requests), _STRATEGIES[opened % len(_STRATEGIES)]
        with Pipeline(draft_engine="mlx", strategy=strategy) as pipeline:
            place = mark(pipeline.address)
            reference = serve(pipeline, request)
            undisturbed.append(reference)
            failures += wrong(request, reference, f"seed {seed}, pipeline {opened}, undisturbed")
            killed: set[int] = set()
            for _ in range(min(_KILLS, count - done)):
                served, at = _kill_during(pipeline, request, killed, source.uniform(0.0, reference.seconds))
                failures += wrong(request, served, f"seed {seed}, kill {done}, {strategy}")
                stalls += added([served.longest_gap(since=at)], reference.longest_gap() or 0.0)
                done += 1
                on_step()
            opened += 1
        failures += left_behind(f"seed {seed}, pipeline {opened}", remains(place))
    step = median_gap(undisturbed)
    return DrillOutcome(
        KILL_PROMISE,
        f"{done} kills, {len(failures)} failures; added p50 / p99 / max {milliseconds(stalls)}, "
        f"step {1000 * step:.0f} ms",
        failures,
        too_late("The added time at p99", percentile(stalls, 0.99), step + _ADDED_SECONDS),
        {"kills": done, "step_ms": round(1000 * step, 1), **spread("added", stalls)},
    )


def stop_draft(count: int, seed: int, on_step: OnStep) -> DrillOutcome:
    """Stop the draft in `count` requests at a random moment; it continues when the request has ended."""
    source = random.Random(seed)
    requests = drill_requests(seed)
    gaps = _Gaps(STOP_PROMISE, "stops", count)
    for strategy, share in _shared(count, ("adaptive", "ssd", "sd")):
        with Pipeline(draft_engine="mlx", strategy=strategy) as pipeline:
            place = mark(pipeline.address)
            pid = members(place)["draft_worker"]
            for number in range(share):
                request = source.choice(requests)
                length = serve(pipeline, request).seconds
                fault = DelayedFault(source.uniform(0.0, length), lambda pid=pid: os.kill(pid, signal.SIGSTOP))
                served = serve(pipeline, request)
                since = fault.done()
                os.kill(pid, signal.SIGCONT)
                gaps.add(request, served, served.longest_gap(since), f"seed {seed}, {strategy}, stop {number}")
                on_step()
        gaps.failures += left_behind(f"seed {seed}, {strategy}", remains(place))
    return gaps.outcome()


def send_garbage(count: int, seed: int, on_step: OnStep) -> DrillOutcome:
    """`count` requests in all, shared among one pipeline for every kind of faulty draft."""
    source = random.Random(seed)
    requests = drill_requests(seed)
    gaps = _Gaps(GARBAGE_PROMISE, "requests", count)
    modes = list(MODES)
    source.shuffle(modes)
    for index, (mode, share) in enumerate(_shared(count, modes)):
        command = (*module_command("orchestrator.lab.drill.faulty_draft"), mode)
        with Pipeline(strategy=_STRATEGIES[index % len(_STRATEGIES)], draft_command=command) as pipeline:
            for number in range(share):
                request = source.choice(requests)
                served = serve(pipeline, request)
                longest = served.longest_gap() or 0.0 if served.arrivals else None
                gaps.add(request, served, longest, f"seed {seed}, {mode}, request {number}")
                on_step()
            place = mark(pipeline.address)
        gaps.failures += left_behind(f"seed {seed}, {mode}", remains(place))
    return gaps.outcome()


class _Gaps:
    """Collects failures and longest gaps of requests whose target must go on within 250 ms."""

    def __init__(self, promise: str, unit: str, count: int) -> None:
        self.failures: list[str] = []
        self._late: list[str] = []
        self._gaps: list[float] = []
        self._promise, self._unit, self._count = promise, unit, count

    def add(self, request: DrillRequest, served: ServedRequest, gap: float | None, when: str) -> None:
        self.failures += wrong(request, served, when)
        if gap is not None:
            self._gaps.append(gap)
            self._late += too_late(f"{when}: going on", gap, _FALLBACK_SECONDS)

    def outcome(self) -> DrillOutcome:
        measured = (
            f"{self._count} {self._unit}, {len(self.failures)} failures; "
            f"longest gap p50 / p99 / max {milliseconds(self._gaps)}"
        )
        figures = {self._unit: self._count, **spread("gap", self._gaps)}
        return DrillOutcome(self._promise, measured, self.failures, self._late, figures)


def _shared(count: int, names: Sequence[str]) -> Iterator[tuple[str, int]]:
    """`count` shared among the names; the first ones get the remainder. Names without a share are left out."""
    for index, name in enumerate(names):
        share = (count + len(names) - 1 - index) // len(names)
        if share:
            yield name, share


def _kill_during(
    pipeline: Pipeline, request: DrillRequest, killed: set[int], delay: float
) -> tuple[ServedRequest, float]:
    """A request whose draft is killed `delay` seconds after its start, and the time of the kill."""
    place = mark(pipeline.address)
    # A killed process stays in the list until the supervisor has collected its exit code.
    pid = until(lambda: {members(place).get("draft_worker", 0)} - killed - {0}).pop()
    killed.add(pid)

    def kill_draft() -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    fault = DelayedFault(delay, kill_draft)
    served = serve(pipeline, request)
    return served, fault.done()


# The target is killed -----------------------------------------------------------------------------

TARGET_PROMISE = "target killed: requests go on, no token lost or doubled; three deaths a minute end with a sentence"
_SURVIVED = 2
"""Kills that a pipeline survives within a minute."""
_SENTENCE = re.compile(r"The target worker ended by signal 9\..*three times within a minute.*doctor")
_OF_TARGET = ("adaptive", "ar", "ssd")


def kill_target(count: int, seed: int, on_step: OnStep) -> DrillOutcome:
    """Kill `count` targets, two a pipeline, each at a random moment of a request; a third kill ends the pipeline."""
    source = random.Random(seed)
    requests = drill_requests(seed)
    failures: list[str] = []
    gaps: list[float] = []
    opened = done = 0
    while done < count:
        with Pipeline(draft_engine="mlx", strategy=_OF_TARGET[opened % len(_OF_TARGET)]) as pipeline:
            request, when = source.choice(requests), f"seed {seed}, pipeline {opened}"
            undisturbed = serve(pipeline, request)
            failures += wrong(request, undisturbed, f"{when}, undisturbed")
            killed: set[int] = set()
            for number in range(min(_SURVIVED, count - done)):
                pid = _fresh_target(pipeline, killed)
                fault = DelayedFault(source.uniform(0.0, undisturbed.seconds), lambda pid=pid: _kill(pid))
                served = serve(pipeline, request)
                gap = served.longest_gap(since=fault.done())
                gaps += [] if gap is None else [gap]
                failures += wrong(request, served, f"{when}, kill {number}")
                done += 1
                on_step()
            if len(killed) == _SURVIVED:
                failures += [f"{when}: {text}" for text in _third_kill(pipeline, killed)]
            place = mark(pipeline.address)
        failures += left_behind(when, remains(place))
        opened += 1
    measured = f"{done} kills, {len(failures)} failures; resumed after p50 / p99 / max {milliseconds(gaps)}"
    return DrillOutcome(
        TARGET_PROMISE, measured, failures, (), {"kills": done, "breakers": opened, **spread("resume", gaps)}
    )


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
