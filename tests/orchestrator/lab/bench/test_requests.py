"""Figures of several requests at once follow from the measurements."""

import json

import pytest
from click.testing import CliRunner

from orchestrator.cli.app import cli
from orchestrator.lab.bench.contender import GenerationTask
from orchestrator.lab.bench.requests import Served, Throughput, groups, parse_requests, rate, throughput
from protocol.errors import InputError
from tests.support.bench_measurements import generation


def _served(submitted: float, *arrivals: float) -> Served:
    return Served(submitted, generation(arrivals=arrivals))


def test_tokens_are_counted_while_all_requests_are_decoded():
    first = _served(0.0, 1.0, 2.0, 2.5, *4 * [3.0])
    second = _served(0.5, 1.5, *3 * [2.0], *5 * [8.5])

    assert throughput([first, second]) == Throughput(5 + 3, 3.0 - 2.0)
    assert throughput([_served(0.5, *4 * [1.0])]) == Throughput(4, 1.5 - 0.5)
    assert rate([Throughput(7, 1.0), Throughput(5, 3.0)]) == pytest.approx(12 / 4)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_every_number_of_requests_has_the_same_texts(count: int):
    tasks = [GenerationTask((token,), 8, 0.0, 0) for token in range(4)]
    batches = groups(tasks, count)

    assert {len(batch) for batch in batches} == {count}
    assert {task for batch in batches for task in batch} == set(tasks)


@pytest.mark.parametrize("text", ["", "0", "1,x", "1,-2", "65", "1, 2"])
def test_numbers_of_requests_are_checked(text: str):
    with pytest.raises(InputError, match="1,2,4,8"):
        parse_requests(text)


@pytest.mark.thorough
def test_concurrent_requests_are_measured_on_real_processes():
    words = "bench requests 1,3 --max-tokens 6 --repeats 1 --strategies adaptive --json"

    result = CliRunner().invoke(cli, words.split(), catch_exceptions=False)

    rows = json.loads(result.stdout)["results"]
    assert [(row["contender"], row["requests"], row["exact"]) for row in rows] == [
        *(("mlx-lm, batched", 1, None), ("mlx-lm, batched", 3, None)),
        *(("adaptive", 1, True), ("adaptive", 3, True)),
    ]
    assert all(row["tokens_per_second"] > 0 for row in rows)
