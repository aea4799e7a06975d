"""A target whose memory runs out in the middle of a request ends that one and serves the next. Real processes.

The failures are injected: a processor's allocator never fails where Linux overcommits memory.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator import InputError, Pipeline, SamplingParams
from tests.support.paths import DEMO_DRAFT, DEMO_TARGET
from tests.support.processes import inject, mark, members, remains, until

LIMIT = 300
"""Tokens of a sequence for which the injected allocator has memory."""
PROGRAM = f"""
from protocol.inference.tree_sequence import TreeSequence

def failing(method):
    def call(self, tokens, *others, **named):
        if self.committed + len(tokens) > {LIMIT}:
            raise RuntimeError("[malloc] Unable to allocate 1073741824 bytes.")
        return method(self, tokens, *others, **named)
    return call

TreeSequence.prefill = failing(TreeSequence.prefill)
TreeSequence.evaluate = failing(TreeSequence.evaluate)
"""
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
SHORT, MIDDLE, LONG = "def quicksort(items):", "x = 2\n" * 50, "x = 1\n" * 400


@pytest.fixture
def short_of_memory(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Pipeline]:
    inject(monkeypatch, tmp_path, request.param, PROGRAM)
    prefilling: dict[str, Any] = {"prefill_engine": "mlx", "prefill": "always"} if "prefill" in request.param else {}
    pipeline = Pipeline(str(DEMO_TARGET), str(DEMO_DRAFT), draft_engine="mlx", **prefilling)
    with pipeline:
        name = mark(pipeline)
        yield pipeline
    until(lambda: not remains(name))


@pytest.mark.parametrize("short_of_memory", ["target_worker"], indirect=True)
def test_the_request_ends_with_a_sentence_and_the_next_one_is_served_by_the_same_process(short_of_memory: Pipeline):
    before = short_of_memory.generate(SHORT, GREEDY).text
    process = members(mark(short_of_memory))["target_worker"]
    with pytest.raises(InputError, match="memory does not suffice for this request"):
        short_of_memory.generate(LONG, GREEDY)
    with pytest.raises(InputError, match="memory does not suffice for this request"):
        short_of_memory.generate(SHORT, SamplingParams(temperature=0.0, max_tokens=LIMIT + 50))

    assert short_of_memory.generate(SHORT, GREEDY).text == before
    assert members(mark(short_of_memory))["target_worker"] == process


@pytest.mark.thorough
@pytest.mark.parametrize("short_of_memory", ["draft_worker", "draft_worker.prefill"], indirect=True)
def test_without_memory_for_another_worker_the_target_goes_on_alone(
    short_of_memory: Pipeline, request: pytest.FixtureRequest
):
    program = request.node.callspec.params["short_of_memory"]
    process = members(mark(short_of_memory))[program]
    alone, helped = (short_of_memory.generate(prompt, GREEDY) for prompt in (LONG, MIDDLE))

    assert len(alone.tokens) == 24
    assert members(mark(short_of_memory))[program] == process
    figures = helped.statistics
    assert (figures.draft_busy if program == "draft_worker" else figures.adopted_tokens) > 0
    assert program == "draft_worker" or alone.statistics.adopted_tokens == 0
