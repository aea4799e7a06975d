"""KV outlives its worker and its request, and changes no token; it never outlives the pipeline. Real processes."""

import json
import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from msgspec.structs import replace

from orchestrator import Pipeline, SamplingParams
from orchestrator.runtime.session import Session
from protocol.kv.arena import Arena
from protocol.kv.segments import stale_segments
from protocol.messages.kv import KvOffer
from protocol.messages.worker import Prefilled, Verdict
from protocol.paths import segments_folder
from tests.conftest import Reference
from tests.support.processes import generate_while, mark, members, of_worker, remains, shoot, until
from tests.support.segments import exists

PARAMS = SamplingParams(temperature=0.8, seed=21, max_tokens=40)


def prompt(seed: int, length: int = 500) -> tuple[int, ...]:
    """One that no other test shares."""
    return tuple(random.Random(seed).choices(range(1, 4096), k=length))


@pytest.fixture(scope="module")
def pipeline() -> Iterator[Pipeline]:
    with Pipeline() as pipeline:
        name = mark(pipeline)
        yield pipeline
    assert remains(name) == []


def arenas(pipeline: Pipeline) -> list[str]:
    """Names of the shared memory that this pipeline's orchestrator owns."""
    owner = members(mark(pipeline))["orchestrator"]
    found = []
    for entry in segments_folder().glob("lp-*"):
        # It may go while it is looked at.
        with suppress(FileNotFoundError):
            found += [entry.name] * (json.loads(entry.read_bytes())["pid"] == owner)
    return sorted(found)


def test_a_target_that_is_killed_goes_on_from_what_it_had_saved(tmp_path: Path, reference: Reference):
    """It saves in slices between verifications, a busy machine late: at this pace the answer lasts that long."""
    asked, journal, params = prompt(1), tmp_path / "journal", replace(PARAMS, max_tokens=1000)
    with Pipeline(record=str(journal), pace="m4-16gb-qwen2.5-3b") as pipeline, pipeline.stream(asked, params) as stream:
        next(iter(stream))
        until(lambda: any(offer.tokens >= 128 for offer in of_worker(journal, KvOffer, "target")))
        shoot(pipeline, "target_worker")
        first, again = until(lambda: (both := of_worker(journal, Prefilled, "target"))[1:] and both)
        before = len(of_worker(journal, Verdict, "target"))
        until(lambda: len(of_worker(journal, Verdict, "target")) > before + 5)
        stream.cancel()
        list(stream)

    assert stream.result is not None
    tokens = stream.result.tokens
    assert tokens == reference(asked, replace(params, max_tokens=len(tokens))).tokens
    assert (first.adopted, again.adopted >= 128) == (0, True)


@pytest.mark.thorough
def test_a_later_request_does_not_read_the_same_prompt_again(pipeline: Pipeline, reference: Reference):
    asked = prompt(2)
    first = pipeline.generate(asked, PARAMS)
    again = pipeline.generate(asked, PARAMS)
    forked = pipeline.generate((*asked[:450], *asked[:30]), PARAMS)

    assert first.statistics.adopted_tokens == 0
    assert again.statistics.adopted_tokens == len(asked) - 1
    assert forked.statistics.adopted_tokens == 450
    assert first.tokens == again.tokens == reference(asked, PARAMS).tokens
    assert forked.tokens == reference((*asked[:450], *asked[:30]), PARAMS).tokens


@pytest.mark.thorough
def test_edits_twins_and_a_death_between_turns_change_no_token(pipeline: Pipeline, reference: Reference):
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=12)
    asked = prompt(9, 300)
    first = pipeline.generate(asked, params)
    longer, edited = (*asked, *first.tokens, 7, 8), (*asked[:200], *prompt(10, 60))
    with ThreadPoolExecutor(3) as threads:
        twins = list(threads.map(lambda each: pipeline.generate(each, params), (longer, edited, longer)))
    os.kill(members(mark(pipeline))["draft_worker"], signal.SIGKILL)
    last = (*longer, *twins[0].tokens, 9)
    after = pipeline.generate(last, params)

    assert [twin.tokens for twin in twins] == [reference(each, params).tokens for each in (longer, edited, longer)]
    assert after.tokens == reference(last, params).tokens
    assert twins[0].statistics.adopted_tokens + twins[2].statistics.adopted_tokens >= len(longer)
    assert twins[1].statistics.adopted_tokens >= 200
    assert after.statistics.adopted_tokens >= len(longer)


@pytest.mark.thorough
def test_corrupted_memory_costs_a_prefill_and_a_warning(pipeline: Pipeline, reference: Reference):
    asked = prompt(4)
    before = set(arenas(pipeline))
    pipeline.generate(asked, PARAMS)
    (name,) = set(arenas(pipeline)) - before
    Arena.attach(name).keys[2, 1, 77, 5] += 1
    # The target that evaluated it has no need of the arena.
    generate_while(pipeline, prompt(40), PARAMS, 3, lambda: shoot(pipeline, "target_worker"))

    result = pipeline.generate(asked, PARAMS)

    assert result.statistics.adopted_tokens == 0
    assert result.tokens == reference(asked, PARAMS).tokens
    assert f"KV arena {name} is torn" in (Path(mark(pipeline)) / "orchestrator.log").read_text()
    assert name not in arenas(pipeline)


@pytest.mark.thorough
def test_without_memory_for_kv_there_is_none(reference: Reference):
    asked = prompt(5)
    with Pipeline(strategy="ar", arena_memory=0) as pipeline:
        results = [pipeline.generate(asked, PARAMS) for _ in range(2)]
        assert arenas(pipeline) == []

    assert [result.statistics.adopted_tokens for result in results] == [0, 0]
    assert results[0].tokens == results[1].tokens == reference(asked, PARAMS).tokens


@pytest.fixture(scope="module")
def reading() -> Iterator[Pipeline]:
    with Pipeline(prefill_engine="mlx", prefill="always") as pipeline:
        name = mark(pipeline)
        yield pipeline
    assert remains(name) == []


@pytest.mark.thorough
def test_a_prompt_may_be_read_by_another_process(reading: Pipeline, reference: Reference):
    asked = prompt(6)

    result = reading.generate(asked, PARAMS)

    assert result.statistics.adopted_tokens == len(asked) - 1
    assert result.tokens == reference(asked, PARAMS).tokens


@pytest.mark.thorough
def test_a_prefill_worker_that_is_killed_is_done_without(reading: Pipeline, reference: Reference):
    asked = prompt(7, 1500)
    pid = members(mark(reading))["draft_worker.prefill"]
    os.kill(pid, signal.SIGSTOP)
    with reading.stream(asked, PARAMS) as stream:
        os.kill(pid, signal.SIGKILL)
        for _ in stream:
            pass
        result = stream.result

    assert result is not None
    assert result.tokens == reference(asked, PARAMS).tokens
    assert result.statistics.adopted_tokens == 0
    until(lambda: members(mark(reading)).get("draft_worker.prefill", pid) != pid)


@pytest.mark.thorough
def test_what_a_killed_orchestrator_leaves_is_gone_at_the_next_start():
    with Pipeline(strategy="ar") as pipeline:
        pipeline.generate(prompt(8), PARAMS)
        left = arenas(pipeline)
        assert left
        os.kill(members(mark(pipeline))["orchestrator"], signal.SIGKILL)
        until(lambda: not members(mark(pipeline)))

        session = Session.create()

        assert not set(left) & set(stale_segments())
        assert not [name for name in left if exists(name)]
        session.remove()
