"""Laws of what is shown: overlap by its formulas, reports of every kind, a page that needs nothing else."""

import re
import sys
from pathlib import Path

import pytest

from orchestrator.lab.bench.figures import rows
from orchestrator.lab.calibration import OverlapTimes
from orchestrator.lab.findings import Findings, Table, Value
from orchestrator.lab.first_light import idle, neural_engine, widths
from orchestrator.lab.first_light.devices import efficiency, gain, pair_seconds
from orchestrator.lab.first_light.pipelines import placed
from orchestrator.lab.first_light.report import LightReport, StageReport, page
from orchestrator.lab.first_light.stages import Asked, LightSettings
from orchestrator.lab.forwards import Compared, ForwardsReady, ForwardTimed, Loop, Ties
from orchestrator.machine.check import Check
from orchestrator.machine.default_target import VARIABLE
from orchestrator.machine.neural_engine import StageOutcome, judge
from protocol.contracts.coreml import Agreed, ExaminedSystem, Loaded, Loading, Predicted, Timed
from tests.support.bench_measurements import measurement, statistics

PREDICT_TABLES = ("loading", "loaded", "agreed", "predicted", "timed")
FAKE = (sys.executable, "-m", "tests.support.fake_examiner")


@pytest.mark.parametrize(
    ("times", "pair", "won"),
    [
        ((20.0, 7.0, 20.0, 7.0), 20.0, 2.0),
        ((20.0, 8.0, 40.0, 16.0), 28.0, 1.0),
        # 8 ms beside the draft do 4 ms of the target's 20: 16 more remain.
        ((20.0, 4.0, 40.0, 8.0), 8.0 + 16.0, 1.0),
    ],
    ids=["no slow-down hides the shorter step", "one device for both wins nothing", "the longer step ends alone"],
)
def test_the_time_of_a_pair_of_steps(times: tuple[float, float, float, float], pair: float, won: float):
    assert pair_seconds(OverlapTimes(*times)) == pytest.approx(pair)
    assert gain(OverlapTimes(*times)) == pytest.approx(won)
    # As was reported of an M4.
    assert efficiency(22.1 - 1000 / 137, 1000 / 137, 16.8) == pytest.approx(0.73, abs=0.005)
    assert efficiency(20.0, 7.0, 20.0) == 1.0


def test_an_examination_shows_every_kind_of_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, "demo")
    monkeypatch.setattr(neural_engine, "converted_draft", lambda *_: tmp_path)
    monkeypatch.setattr(neural_engine, "place_of", lambda _: ExaminedSystem("macOS 25A1", "Apple M9", "f" * 64))
    found = neural_engine.examination(Asked(LightSettings(short=True), lambda _: None), "executor", FAKE)
    titles = [table.title for table in found.tables]

    assert titles == [
        *(f"CPU_AND_NE, predict: {kind}" for kind in PREDICT_TABLES),
        *(f"CPU_ONLY, predict: {kind}" for kind in PREDICT_TABLES),
        "CPU_AND_NE, plan: placed",
        *(f"CPU_AND_NE, predict beside a busy GPU: {kind}" for kind in PREDICT_TABLES),
    ]
    times = [table.rows for table in found.tables if table.title.endswith("timed")]
    assert times == [((8, 7.0),), ((8, 30.0),), ((8, 7.0),)]
    assert found.settled == (
        "The package loads on the Neural Engine, compiled if need be: width 8 in 1.5 s.",
        "A predict of width 8 on the Neural Engine takes 7.00 ms, and 7.00 ms beside a busy GPU (1.00 times).",
    )
    assert [value.unit for value in found.values] == ["MiB"]
    assert found.checks[-1] == Check("verdict", "ok", "coreml: all that was examined is as it should be")


def test_a_width_that_does_not_load_is_told_with_the_reason():
    told = StageOutcome(
        "predict", "CPU_AND_NE", (Loading(None), Loading(1), Loaded(1, 2.0), Loading(8)), "hung", "said no"
    )

    assert list(neural_engine.sentences([told])) == [
        "The package loads on the Neural Engine, compiled if need be: width 1 in 2.0 s.",
        "The package's width 8 does not load on the Neural Engine: said no.",
    ]


def test_what_is_slower_beside_a_busy_gpu_decides_nothing():
    place, agreed = ExaminedSystem("macOS 25A1", "Apple M9", "f" * 64), Agreed(8, 0.01, 30, 30)
    alone = StageOutcome("predict", "CPU_AND_NE", (agreed, Predicted(30, True), Timed(8, 7.0)), "done")
    beside = StageOutcome("predict", "CPU_AND_NE", (Timed(8, 70.0),), "crashed", "ended by signal 11", beside=True)

    assert judge([alone, beside], place) == judge([alone], place)


@pytest.mark.parametrize(
    ("flips", "gap", "gpu", "status"),
    [(0, None, True, "ok"), (2, 0.01, True, "warn"), (2, 0.01, False, "fail"), (1, 0.9, True, "fail")],
)
def test_only_a_near_tie_may_fall_otherwise_and_only_on_a_gpu(flips: int, gap: float | None, gpu: bool, status: str):
    found = widths.check("stored", [Compared(5, "chain", 100, 0.2, flips, gap)], gpu)

    assert found.status == status
    assert f"{flips} of 100" in found.text


def test_ties_and_width_steps_are_told_in_a_sentence_each():
    reports = [
        ForwardsReady("GPU", "bfloat16"),
        Ties("own", 120, 4, 15),
        Compared(5, "chain", 120, 0.2, 3, 0.01),
        Ties("float32", 120, 0, 1),
        Compared(5, "chain", 120, 0.2, 1, 0.01, "float32"),
        *(ForwardTimed(width, 4096, ms) for width, ms in ((1, 20.0), (4, 24.0), (8, 26.0), (9, 40.0))),
    ]

    assert widths.sentences(reports) == [
        "Ties (bfloat16, by the model's own head): the two best logits are equal at 4 of 120 places and within one "
        "unit of the last place at 15; 3 of 120 favourites change with the width.",
        "Ties (float32, by the same head in 32 bits): the two best logits are equal at 0 of 120 places and within one "
        "unit of the last place at 1; 1 of 120 favourites change with the width.",
        "Width steps behind 4,096 tokens: a forward of up to 4 tokens takes at most 1.25 times that of a single one "
        "(20.00 ms); the largest step is from 8 to 9 tokens, 1.54 times.",
    ]


def test_idle_time_is_what_a_round_takes_beyond_forwards_that_are_dispatched_ahead():
    own: dict[tuple[Loop, int], float] = {
        ("waited", 1): 22.0,
        ("ahead", 1): 19.5,
        ("waited", 5): 25.0,
        ("ahead", 5): 23.0,
    }
    loops: dict[tuple[Loop, int], float] = {("mlx-lm", 1): 20.0, **own}
    plain = statistics(tokens_per_second=40.0, overhead_per_round=0.001)
    guessing = statistics(tokens_per_second=80.0, tokens_per_round=2.5, overhead_per_round=0.001)
    found = idle.findings(loops, {"ar": plain, "adaptive": guessing}, ())

    assert found.settled == (
        "Plain rounds: the pipeline takes 25.00 ms a token and mlx-lm's own loop 20.00 ms, 0.80 of its speed; the "
        "device is idle for 5.50 ms of each round.",
        "Rounds with guesses: the device is idle for 3.00 of 31.25 ms a round, 1.00 ms for messages and decisions and "
        "2.00 ms while the forward is built.",
    )
    assert [row[3] for row in found.tables[0].rows] == [None, 2.5, None, 2.0, None, 5.5, 3.0]


def test_the_fastest_place_of_the_draft_is_named_by_temperature():
    rates = {("in turns", 0.0): 50.0, ("in turns", 0.8): 45.0, ("Core ML", 0.0): 60.0, ("Core ML", 0.8): 40.0}
    found = [measurement(place, rate, temperature=heat) for (place, heat), rate in rates.items()]

    assert placed(rows(found, ["in turns", "Core ML"]), ()).settled == (
        "Placement at T = 0, tokens/s with the draft on: in turns 50.0, Core ML 60.0; fastest: Core ML.",
        "Placement at T = 0.8, tokens/s with the draft on: in turns 45.0, Core ML 40.0; fastest: in turns.",
    )


# The page --------------------------------------------------------------------------------------------


def report() -> LightReport:
    found = Findings(
        values=(Value("gain <b>", 1.25, "×", "computed", "a & b"),),
        tables=(
            Table("Times", ("tokens", "ms"), ((1, 1.5), (2, 3.0)), "note"),
            Table("Empty", ("a", "b"), (("x", None),)),
        ),
        checks=(Check("OpenBLAS", "warn", "not found", "install it"),),
        settled=("Nothing & all.",),
    )
    stages = (
        StageReport(stage="a", title="First", status="done", seconds=3.0, findings=found),
        StageReport(stage="b", title="Second", status="not here", reason="no Neural Engine"),
        StageReport(stage="c", title="Third", status="failed", reason="<script>alert(1)</script>"),
    )
    return LightReport(program="p 1", machine=("chip",), options=("short: True",), began="now", stages=stages)


def test_the_page_shows_what_was_found_and_needs_nothing_from_elsewhere_and_runs_no_script():
    text = page(report())

    assert not re.search(r"<(script|link|img|iframe)|https?://|url\(|@import", text)
    assert re.findall(r'(?:src|href)="([^"]*)"', text) == ["#a", "#b", "#c"]
    assert text.index("<li>Nothing &amp; all.</li>") < text.index('href="#a"')
    shown = ("<td>1.25</td><td", ">computed<", "not here: no Neural Engine", "&lt;script&gt;", "next: install it")
    assert [words for words in shown if words not in text] == []
