"""Figures of an agent's turns follow from the measurements, and its transcript has the stated length."""

import json

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.cli.app import cli
from orchestrator.lab.bench import reuse
from orchestrator.lab.bench.reuse import (
    CONTENDERS,
    Transcript,
    TranscriptShape,
    Turn,
    findings,
    summary,
    transcript_shape,
)
from orchestrator.lab.report import json_text
from protocol.errors import InputError
from tests.support.bench_measurements import bench_plan, pace, statistics
from tests.support.shown import complaints, shown


@given(st.integers(64, 1 << 17), st.integers(2, 200), st.integers(2, 512))
@settings(max_examples=200, derandomize=True)
def test_every_turn_fits_into_the_context(context: int, turns: int, answer: int):
    try:
        shape = transcript_shape(context, turns, answer)
    except InputError:
        assert context < turns * 20
        return
    transcript = Transcript(range(1000), shape, 3)
    for _ in range(turns - 1):
        transcript.add_turn([0] * shape.answer)

    assert shape.answer <= answer
    assert len(transcript.prompt) + shape.answer == shape.longest <= context


def test_a_turn_resends_all_before_it():
    transcript = Transcript(range(100), TranscriptShape(3, 10, 5, 2), 0)
    first = list(transcript.prompt)
    transcript.add_turn([7, 8])

    assert transcript.prompt == [*first, 7, 8, 10, 11, 12, 13, 14]
    assert Transcript(range(100), TranscriptShape(3, 10, 5, 2), 1).prompt != first


def turn(contender: str, number: int, *, exact: bool = True, overruns: int = 0) -> Turn:
    figures = statistics(
        prompt_tokens=100 * number,
        time_to_first_token=number / 10,
        adopted_tokens=0 if contender == "no reuse" else 100 * number - 50,
        pace=pace(overruns),
    )
    return Turn(contender=contender, repeat=0, number=number, exact=exact, statistics=figures)


def test_the_summary_leaves_the_first_turn_out():
    figures = summary([turn("reuse", number) for number in range(1, 6)])

    assert (figures["first_token"], figures["first_token_last"]) == (pytest.approx(0.35), 0.5)
    assert (figures["evaluated"], figures["adopted"]) == (4 * 49, 1400 - 200)


def test_wrong_tokens_and_overruns_are_reported():
    turns = [turn(name, number) for name in CONTENDERS for number in (1, 2)]
    invalid = [*turns, turn("reuse", 3, exact=False, overruns=50)]
    found, right = (
        findings(each, TranscriptShape(3, 10, 5, 2), bench_plan(temperature=(0.0,))) for each in (invalid, turns)
    )

    assert right.checks == ()
    assert complaints(found) == ["reuse, turn 3: the tokens differ from those without reuse"]
    assert len(complaints(found, "warn")) == 1
    text = shown(found)
    assert "INVALID" in text
    assert "NO" in text
    json.loads(json_text(found))


@pytest.mark.slow
def test_turns_are_measured_on_real_processes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reuse, "TURNS", 4)
    words = "bench reuse --repeats 1 --json"
    result = CliRunner().invoke(cli, words.split(), catch_exceptions=False)
    without, arenas, kept = json.loads(result.stdout)["results"]

    assert all(each["exact"] for each in (without, arenas, kept))
    assert without["adopted"] == 0 < kept["adopted"]
    assert kept["evaluated"] < without["evaluated"] / 2
