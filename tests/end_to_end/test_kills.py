"""Processes are stopped or die: requests go on exactly, or end with a sentence, and nothing is left. Real processes."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from time import sleep

import pytest
from msgspec.structs import replace

from orchestrator import AsyncClient, Client, Pipeline, PipelineError, Result, SamplingParams
from orchestrator.runtime.notices import Notice
from orchestrator.text.tokenizer import TextCodec
from protocol.errors import InputError
from tests.conftest import Reference
from tests.support.paths import DEMO_TARGET
from tests.support.processes import generate_while, inject, mark, members, remains, shoot, until

PROMPT = "def quicksort(items):"
PARAMS = SamplingParams(temperature=0.7, seed=12, max_tokens=80)
PACE = "m4-16gb-qwen2.5-3b"
"""At this pace an answer is under way for seconds on any machine."""
ENDLESS = SamplingParams(max_tokens=2000, logit_bias=dict.fromkeys(TextCodec(DEMO_TARGET).eos, -100.0))


@pytest.fixture(params=["adaptive", pytest.param("ssd", marks=pytest.mark.slow)])
def pipeline(request: pytest.FixtureRequest) -> Iterator[Pipeline]:
    """A pipeline of the test's own; whatever happens in it, nothing is left of it."""
    pipeline = Pipeline(strategy=request.param, pace=PACE)
    with pipeline:
        name = mark(pipeline)
        yield pipeline
    until(lambda: not remains(name))


FATAL = """
import os
from protocol.messages.worker import Fault, Start
from target_worker.worker import TargetWorker

real = TargetWorker.handle

def handle(self, message):
    if isinstance(message, Start) and message.sampling.seed == 666:
        {act}
    return real(self, message)

TargetWorker.handle = handle
"""
FAILING = """
from protocol.inference.tree_sequence import TreeSequence

def evaluate(self, tokens, *others, real=TreeSequence.evaluate):
    if self.committed > 20:
        raise ValueError("Shapes (3,4) and (4,4) cannot be broadcast.")
    return real(self, tokens, *others)

TreeSequence.evaluate = evaluate
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("act", "times"),
    [
        # One request more than the deaths in a minute that end a pipeline.
        pytest.param("os._exit(9)", 2, marks=pytest.mark.thorough),
        pytest.param("return iter([Fault('lost', 'no reason', message.request)])", 1, marks=pytest.mark.thorough),
        pytest.param("return iter([])", 1, marks=pytest.mark.slow),
    ],
)
def test_a_request_over_which_targets_end_or_do_nothing_fails_alone(
    act: str, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: Reference
):
    inject(monkeypatch, tmp_path, "target_worker", FATAL.format(act=act))
    with Pipeline() as pipeline:
        for _ in range(times):
            with pipeline.stream(PROMPT, PARAMS) as stream:
                next(iter(stream))
                with pytest.raises(InputError, match="Two targets ended while they computed this request"):
                    pipeline.generate(PROMPT, replace(PARAMS, seed=666))
                for _ in stream:
                    pass
            assert stream.result is not None
            assert stream.result.tokens == reference(PROMPT, PARAMS).tokens


def test_a_target_that_fails_at_every_level_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    inject(monkeypatch, tmp_path, "target_worker", FAILING)
    notices: list[Notice] = []
    with (
        Pipeline(draft_engine="mlx", on_notice=notices.append) as pipeline,
        pytest.raises(PipelineError, match="Two targets ended while they computed this request"),
    ):
        pipeline.generate(PROMPT, PARAMS)

    assert any("failed (ValueError: Shapes" in notice.text for notice in notices)


@pytest.mark.slow
def test_a_request_outlives_a_standstill_of_the_whole_pipeline(pipeline: Pipeline, reference: Reference):
    """For longer than a connection over TCP would wait."""

    def pause() -> None:
        processes = members(mark(pipeline)).values()
        for pid in processes:
            os.kill(pid, signal.SIGSTOP)
        sleep(13.0)
        for pid in processes:
            os.kill(pid, signal.SIGCONT)

    assert generate_while(pipeline, PROMPT, PARAMS, 2, pause).tokens == reference(PROMPT, PARAMS).tokens


def test_without_its_orchestrator_a_pipeline_says_so_and_its_workers_end(pipeline: Pipeline):
    name = mark(pipeline)
    with pytest.raises(PipelineError, match=r"^The orchestrator ended unexpectedly; start it again\."):
        generate_while(pipeline, PROMPT, ENDLESS, 2, lambda: shoot(pipeline, "orchestrator"))

    until(lambda: not members(name))


@pytest.mark.thorough
def test_clients_of_a_dead_pipeline_are_told_so(pipeline: Pipeline):
    shoot(pipeline, "orchestrator")

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
with Pipeline(pace={PACE!r}) as pipeline:
    for piece in pipeline.stream({PROMPT!r}, SamplingParams(max_tokens=2000, logit_bias={ENDLESS.logit_bias})):
        print(pipeline.address, flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        address = parent.stdout.readline().strip()
        name = address.removeprefix("ipc://").removesuffix("/clients")
        assert set(members(name)) == {"orchestrator", "target_worker", "draft_worker"}

        parent.kill()

    until(lambda: not remains(name))
