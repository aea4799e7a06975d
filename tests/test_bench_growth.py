"""How speed grows with length and load must follow from what was served, whoever was served with whom."""

import io
import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from rich.console import Console

from orchestrator.bench import growth_report
from orchestrator.bench.growth import Growth, Load, Served, left_out, loads, summed_up, together
from orchestrator.bench.trials import Plan
from orchestrator.cli import cli
from orchestrator.core.tally import Tally
from protocol.errors import InputError
from protocol.messages import Pace, Statistics


def _statistics(
    *, began: float, ended: float, generated: int, rounds: int, verifying: float, reading: float
) -> Statistics:
    tally = Tally(0.0, 128)
    tally.decoding(began)
    tally.prefill_seconds = reading
    for _ in range(rounds):
        tally.round(0, 0, verifying / rounds)
    tally.tokens(generated, ended)
    return tally.statistics(ended, drafting=False, caching=False)


def _served(**figures) -> Served:
    return Served(figures["ended"], _statistics(**figures))


def test_one_request_has_its_own_speed_and_the_time_left_over_by_its_verifications():
    alone = _served(began=2.0, ended=4.0, generated=40, rounds=10, verifying=1.5, reading=1.0)

    rate, overhead = together([alone])

    assert rate == pytest.approx(20.0)
    assert overhead == pytest.approx(0.05)


def test_requests_at_once_share_the_time_less_the_prompts_read_in_between():
    first = _served(began=1.0, ended=5.0, generated=40, rounds=10, verifying=1.5, reading=0.9)
    second = _served(began=2.0, ended=6.0, generated=60, rounds=10, verifying=1.7, reading=1.0)

    rate, overhead = together([first, second])

    assert rate == pytest.approx(100 / (5.0 - 1.0))
    assert overhead == pytest.approx((4.0 - 3.2) / 20)
    assert together([second, first]) == pytest.approx((rate, overhead))


def test_verifications_that_serve_several_requests_never_make_negative_overhead():
    both = [_served(began=0.0, ended=1.0, generated=10, rounds=5, verifying=1.0, reading=0.0) for _ in range(2)]

    assert together(both)[1] == 0.0


def test_figures_are_medians_over_repeats():
    repeats = [[_served(began=0.0, ended=s, generated=10, rounds=5, verifying=s / 2, reading=0.0)] for s in (1, 2, 9)]

    growth = summed_up("ar", Load(128, 1), repeats)

    assert (growth.tokens_per_second, growth.overhead_per_round) == (pytest.approx(5.0), pytest.approx(0.2))


@pytest.mark.parametrize(("overruns", "representative"), [(2, True), (3, False)])
def test_growth_at_a_pace_is_invalid_when_more_than_one_forward_in_a_hundred_overran(
    overruns: int, representative: bool
):
    repeats = []
    for late in (overruns, 0):
        served = _served(began=0.0, ended=1.0, generated=10, rounds=5, verifying=0.5, reading=0.0)
        pace = Pace(profile="m4", forwards=100, overruns=late, stretch=0.0, valid=late <= 1)
        repeats.append([Served(served.ended, msgspec.structs.replace(served.statistics, pace=pace))])

    assert summed_up("ar", Load(128, 1), repeats).representative is representative


def test_lengths_are_those_for_which_the_context_has_room():
    assert [load.prompt_tokens for load in loads(2048, 64) if load.requests == 1] == [128, 256, 512, 1024]
    assert [load.requests for load in loads(2048, 64)][-4:] == [1, 2, 4, 8]
    assert left_out(2048, 64) == "The target's context of 2,048 has no room for prompts of 2,048, 4,096, 8,192."
    assert left_out(100_000, 64) == ""


def test_a_context_without_room_for_any_length_is_refused():
    with pytest.raises(InputError, match="no room for 128 tokens"):
        loads(130, 64)


def test_growth_is_shown_and_drawn_and_says_what_was_left_out(tmp_path: Path):
    figures = [
        Growth(
            strategy=strategy,
            prompt_tokens=length,
            requests=requests,
            tokens_per_second=12.5,
            tokens_per_round=2.0,
            overhead_per_round=3e-4,
            representative=length == 128,
        )
        for strategy in ("ar", "adaptive")
        for length, requests in ((128, 1), (256, 1), (128, 2))
    ]
    plan = Plan.of(
        target=None,
        draft=None,
        repeats=1,
        max_tokens=64,
        random_draft=False,
        draft_tokens="0",
        strategies="ar,adaptive",
        temperature=(),
    )
    output = io.StringIO()

    Console(file=output, width=100).print(growth_report.table(figures, plan, 512))
    growth_report.draw(figures, tmp_path / "growth.png")

    assert "12.5" in output.getvalue()
    assert "INVALID" in output.getvalue()
    assert "no room for prompts of 512" in output.getvalue()
    assert (tmp_path / "growth.png").stat().st_size > 1000


def test_growth_is_measured_on_real_processes():
    words = "bench --growth --max-tokens 2 --repeats 1 --strategies ar --json"

    result = CliRunner().invoke(cli, words.split(), catch_exceptions=False)

    report = json.loads(result.stdout)
    assert [(row["prompt_tokens"], row["requests"]) for row in report["results"]] == [
        *((128, 1), (256, 1), (512, 1), (1024, 1), (128, 2), (128, 4), (128, 8))
    ]
    assert report["left_out"] == [2048, 4096, 8192]
    assert all(row["tokens_per_second"] > 0 for row in report["results"])
