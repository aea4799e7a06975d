"""Processes die at any moment: requests go on exactly, or end with a sentence, and nothing is left. Real processes."""

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from orchestrator import AsyncClient, Client, Pipeline, PipelineError, Result, SamplingParams
from tests.conftest import Reference
from tests.processes import mark, members, remains, state, until

PROMPT = "def quicksort(items):"
PARAMS = SamplingParams(temperature=0.7, seed=12, max_tokens=80)


@pytest.fixture(params=["adaptive", pytest.param("ssd", marks=pytest.mark.slow)])
def pipeline(request: pytest.FixtureRequest) -> Iterator[Pipeline]:
    """A pipeline of the test's own; whatever happens in it, nothing is left of it."""
    pipeline = Pipeline(strategy=request.param)
    with pipeline:
        name = mark(pipeline)
        yield pipeline
    until(lambda: not remains(name), seconds=2.0)


def shoot(pipeline: Pipeline, program: str, kind: signal.Signals) -> int:
    """Send a signal to a process of the pipeline, once it is there; its process id."""
    pid = until(lambda: members(mark(pipeline)).get(program))
    os.kill(pid, kind)
    return pid


def generate_and_shoot(pipeline: Pipeline, program: str, after: int, kind: signal.Signals = signal.SIGKILL) -> Result:
    """The result of a request during which, behind so many pieces of text, a process is sent a signal."""
    with pipeline.stream(PROMPT, PARAMS) as stream:
        for count, _ in enumerate(stream):
            if count == after:
                shoot(pipeline, program, kind)
        assert stream.result is not None
        return stream.result


def shoot_every_target(pipeline: Pipeline) -> None:
    """Ask for text and kill each target as soon as it has said something."""
    shot = set()
    with pipeline.stream(PROMPT, SamplingParams(max_tokens=2000)) as stream:
        for _ in stream:
            pid = members(mark(pipeline)).get("target_worker")
            if pid is not None and pid not in shot:
                shot.add(pid)
                os.kill(pid, signal.SIGKILL)


def test_a_draft_that_dies_is_replaced_twice_and_then_done_without(pipeline: Pipeline, reference: Reference):
    source = random.Random(1)
    shot: set[int] = set()
    for death in range(3):
        # One that was shot stays in the list until it is buried.
        shot.add(until(lambda: {members(mark(pipeline)).get("draft_worker", 0)} - shot - {0}).pop())

        result = generate_and_shoot(pipeline, "draft_worker", after=source.randrange(12))

        assert result.tokens == reference(PROMPT, PARAMS).tokens, death
    assert pipeline.generate(PROMPT, PARAMS).tokens == reference(PROMPT, PARAMS).tokens
    assert "draft_worker" not in members(mark(pipeline))


def test_a_target_that_dies_is_replaced_and_the_request_goes_on(pipeline: Pipeline, reference: Reference):
    source = random.Random(2)
    for death in range(2):
        result = generate_and_shoot(pipeline, "target_worker", after=source.randrange(2, 12))

        assert result.tokens == reference(PROMPT, PARAMS).tokens, death


def test_a_target_that_keeps_dying_ends_the_request_with_a_sentence(pipeline: Pipeline):
    sentence = r"The target worker ended by signal 9\..*three times within a minute.*doctor"
    with pytest.raises(PipelineError, match=sentence):
        shoot_every_target(pipeline)
    with pytest.raises(PipelineError, match=sentence):
        pipeline.generate(PROMPT)


def test_a_stopped_draft_is_not_waited_for(pipeline: Pipeline, reference: Reference):
    result = generate_and_shoot(pipeline, "draft_worker", after=3, kind=signal.SIGSTOP)

    assert result.tokens == reference(PROMPT, PARAMS).tokens


def test_a_target_that_was_stopped_for_a_while_goes_on(pipeline: Pipeline, reference: Reference):
    with pipeline.stream(PROMPT, PARAMS) as stream:
        for count, _ in enumerate(stream):
            if count == 2:
                pid = shoot(pipeline, "target_worker", signal.SIGSTOP)
                until(lambda pid=pid: state(pid).startswith("T"))
                os.kill(pid, signal.SIGCONT)

    assert stream.result is not None
    assert stream.result.tokens == reference(PROMPT, PARAMS).tokens


def test_without_its_orchestrator_a_pipeline_says_so_and_its_workers_end(pipeline: Pipeline):
    name = mark(pipeline)
    with pytest.raises(PipelineError, match=r"^The orchestrator ended unexpectedly; start it again\."):
        generate_and_shoot(pipeline, "orchestrator", after=2)

    until(lambda: not members(name), seconds=2.0)


def test_clients_of_a_dead_pipeline_are_told_so(pipeline: Pipeline):
    shoot(pipeline, "orchestrator", signal.SIGKILL)

    async def ask() -> tuple[Result | BaseException, ...]:
        client = AsyncClient(pipeline.address)
        in_a_thread = asyncio.to_thread(Client(pipeline.address).generate, PROMPT)
        try:
            return await asyncio.gather(client.generate(PROMPT), in_a_thread, return_exceptions=True)
        finally:
            client.close()

    for answer in asyncio.run(ask()):
        assert isinstance(answer, PipelineError)
        assert str(answer).startswith("No pipeline answers at")


def test_nothing_outlives_the_process_that_opened_the_pipeline():
    program = f"""
from orchestrator import Pipeline, SamplingParams
with Pipeline() as pipeline:
    for piece in pipeline.stream({PROMPT!r}, SamplingParams(max_tokens=2000)):
        print(pipeline.address, flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        address = parent.stdout.readline().strip()
        name = address.removeprefix("ipc://").removesuffix("/clients")
        assert set(members(name)) == {"orchestrator", "target_worker", "draft_worker"}

        parent.kill()

    until(lambda: not remains(name), seconds=5.0)
