"""Figures by prompt length and by concurrency follow from the measurements."""

import json

import msgspec
import pytest
from click.testing import CliRunner

from orchestrator.cli.app import cli
from orchestrator.core.request_stats import RequestStats
from orchestrator.lab.bench.contender import GenerationTask
from orchestrator.lab.bench.growth import left_out, lengths, overhead, summary
from orchestrator.lab.bench.requests import (
    Arrivals,
    Throughput,
    groups,
    parse_requests,
    rate,
    throughput,
)
from protocol.errors import InputError
from protocol.messages.client import Pace, Statistics


def _statistics(
    *, began: float, ended: float, generated: int, rounds: int, verifying: float, reading: float
) -> Statistics:
    stats = RequestStats(0.0, 128)
    stats.begin_decoding(began)
    stats.prefill_seconds = reading
    for _ in range(rounds):
        stats.add_round(0, 0, verifying / rounds)
    stats.add_tokens(generated, ended)
    return stats.statistics(ended, drafting=False, caching=False)


def test_the_time_left_over_by_verifications_is_overhead():
    alone = _statistics(began=2.0, ended=4.0, generated=40, rounds=10, verifying=1.5, reading=1.0)

    assert overhead(alone) == pytest.approx(0.05)


def test_figures_are_medians_over_repeats():
    repeats = [_statistics(began=0.0, ended=s, generated=10, rounds=5, verifying=s / 2, reading=0.0) for s in (1, 2, 9)]

    growth = summary("ar", 128, repeats)

    assert (growth.tokens_per_second, growth.overhead_per_round) == (pytest.approx(5.0), pytest.approx(0.2))


@pytest.mark.parametrize(("overruns", "representative"), [(2, True), (3, False)])
def test_growth_at_a_pace_is_invalid_when_more_than_one_forward_in_a_hundred_overran(
    overruns: int, representative: bool
):
    repeats = []
    for late in (overruns, 0):
        served = _statistics(began=0.0, ended=1.0, generated=10, rounds=5, verifying=0.5, reading=0.0)
        pace = Pace(profile="m4", forwards=100, overruns=late, stretch=0.0, valid=late <= 1)
        repeats.append(msgspec.structs.replace(served, pace=pace))

    assert summary("ar", 128, repeats).representative is representative


def test_lengths_are_those_for_which_the_context_has_room():
    assert lengths(2048, 64) == [128, 256, 512, 1024]
    assert left_out(2048, 64) == "The target's context of 2,048 has no room for prompts of 2,048, 4,096, 8,192."
    assert left_out(100_000, 64) == ""


def test_a_context_without_room_for_any_length_is_refused():
    with pytest.raises(InputError, match="no room for 128 tokens"):
        lengths(130, 64)


@pytest.mark.thorough
def test_prompt_lengths_are_measured_on_real_processes():
    words = "bench growth --max-tokens 2 --repeats 1 --strategies ar --json"

    result = CliRunner().invoke(cli, words.split(), catch_exceptions=False)

    report = json.loads(result.stdout)
    assert [row["prompt_tokens"] for row in report["results"]] == [128, 256, 512, 1024]
    assert report["left_out"] == [2048, 4096, 8192]
    assert all(row["tokens_per_second"] > 0 for row in report["results"])


def test_tokens_are_counted_while_all_requests_are_decoded():
    statistics = _statistics(began=0.0, ended=9.0, generated=9, rounds=9, verifying=1.0, reading=0.0)
    first = Arrivals(0.0, ((1.0, 1), (2.0, 2), (3.0, 4)), (), statistics)
    second = Arrivals(0.5, ((2.0, 1), (2.5, 3), (9.0, 5)), (), statistics)

    assert throughput([first, second]) == Throughput(4 + 3, 3.0 - 2.0)
    assert throughput([Arrivals(0.5, ((1.5, 4),), (), statistics)]) == Throughput(4, 1.5 - 0.5)
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
    words = "bench requests 1,3 --max-tokens 6 --repeats 1 --strategies adaptive --draft-tokens 2 --json"

    result = CliRunner().invoke(cli, words.split(), catch_exceptions=False)

    rows = json.loads(result.stdout)["results"]
    assert [(row["contender"], row["requests"], row["exact"]) for row in rows] == [
        *(("mlx-lm, batched", 1, None), ("mlx-lm, batched", 3, None)),
        *(("mlx-lm K=2", 1, None), ("mlx-lm K=2", 3, None)),
        *(("adaptive", 1, True), ("adaptive", 3, True)),
    ]
    assert all(row["tokens_per_second"] > 0 for row in rows)
