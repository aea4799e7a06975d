"""Laws of what is shown: overlap by its formulas, reports of every kind, a page that needs nothing else."""

import re
import sys
from pathlib import Path

import pytest

from orchestrator.lab.calibration import OverlapTimes
from orchestrator.lab.findings import Answer, Findings, Table, Value
from orchestrator.lab.first_light import idle, neural_engine, widths
from orchestrator.lab.first_light.devices import gain
from orchestrator.lab.first_light.report import LightReport, StageReport, page, question_rows
from orchestrator.lab.first_light.stages import Asked, LightSettings, Question
from orchestrator.lab.forwards import Compared, ForwardsReady, ForwardTimed, Loop, LoopTimed, Ties
from orchestrator.machine.check import Check
from orchestrator.machine.default_target import VARIABLE
from orchestrator.machine.neural_engine import StageOutcome, judge
from protocol.contracts.coreml import Agreed, Choices, ExaminedSystem, Loaded, Loading, Predicted, Timed
from tests.support.bench_measurements import statistics

PREDICT_TABLES = ("loading", "loaded", "agreed", "predicted", "timed")
FAKE = (sys.executable, "-m", "tests.support.fake_examiner")


@pytest.mark.parametrize(
    ("times", "won"),
    [((20.0, 7.0, 20.0, 7.0), 2.0), ((20.0, 8.0, 40.0, 16.0), 1.0), ((20.0, 4.0, 40.0, 8.0), 1.0)],
    ids=["neither slows the other", "one device for both wins nothing", "nor does it for a short step"],
)
def test_what_computing_at_once_wins(times: tuple[float, float, float, float], won: float):
    assert gain(OverlapTimes(*times, slowest=0.0)) == pytest.approx(won)


def test_an_examination_shows_every_kind_of_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, "demo")
    monkeypatch.setattr(neural_engine, "converted_draft", lambda *_: tmp_path)
    shorter: list[Choices] = []
    monkeypatch.setattr(neural_engine, "conversion", lambda *asked: shorter.append(asked[2]) or iter(()))
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
    assert [(each.question, each.text) for each in found.answers] == [
        ("package loads", "The package loads on the Neural Engine, compiled if need be: width 8 in 1.5 s."),
        ("package loads", "The package loads again in a new process: width 8 in 1.5 s."),
        (
            "predicts",
            "A predict of width 8 on the Neural Engine takes 7.00 ms, and 7.00 ms beside a busy GPU (1.00 times).",
        ),
        (
            "cache length",
            "A predict of width 8 takes 7.00 ms with a KV cache of 512 tokens, and 7.00 ms with the usual one.",
        ),
    ]
    assert [each.context for each in shorter] == [512]
    assert found.checks[-1] == Check("verdict", "ok", "coreml: all that was examined is as it should be")


def test_a_width_that_does_not_load_is_told_with_the_reason():
    told = StageOutcome(
        "predict", "CPU_AND_NE", (Loading(None), Loading(1), Loaded(1, 2.0), Loading(8)), "hung", "said no"
    )

    assert [each.text for each in neural_engine.sentences([told])] == [
        "The package loads on the Neural Engine, compiled if need be: width 1 in 2.0 s.",
        "Its width 8 does not load on the Neural Engine: said no.",
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
        Ties(120, 4, 15),
        Compared(5, "chain", 120, 0.2, 3, 0.01),
        *(ForwardTimed(width, 4096, ms, 9 * ms) for width, ms in ((1, 20.0), (4, 24.0), (8, 26.0), (9, 40.0))),
        ForwardTimed(9, 16384, 50.0, 900.0),
    ]

    assert [each.text for each in widths.sentences(reports)] == [
        "Ties (bfloat16): the two best logits are equal at 4 of 120 places and within one "
        "unit of the last place at 15; 3 of 120 favourites change with the width.",
        "Width steps behind 4,096 tokens: a forward of up to 4 tokens takes at most 1.25 times that of a single one "
        "(20.00 ms); the largest step is from 8 to 9 tokens, 1.54 times.",
        "The first forward of a new width takes at most 360.0 ms, where later ones take 40.0 ms (9 tokens; widths that "
        "the proof at load has used are known).",
    ]


def test_idle_time_is_what_a_round_takes_beyond_forwards_that_are_dispatched_ahead():
    own: dict[tuple[Loop, int], float] = {
        ("waited", 1): 22.0,
        ("ahead", 1): 19.5,
        ("waited", 5): 25.0,
        ("ahead", 5): 23.0,
    }
    loops = [LoopTimed("mlx-lm", 1, 20.0), *(LoopTimed(*loop, time) for loop, time in own.items())]
    loops += [LoopTimed("unstaged", 1, 23.0), LoopTimed("unstaged", 5, 27.0)]
    loops += [LoopTimed("waited", 1, 23.0, 4096, 3.0), LoopTimed("ahead", 1, 21.0, 4096, 8.0)]
    plain = statistics(tokens_per_second=40.0, overhead_per_round=0.001)
    guessing = statistics(tokens_per_second=80.0, tokens_per_round=2.5, overhead_per_round=0.001)
    found = idle.findings(loops, {"ar": plain, "adaptive": guessing}, ())

    assert [each.text for each in found.answers] == [
        "Staged dispatch: a forward of 1 that is awaited takes 22.00 ms, and 23.00 ms without it; a forward of 5 that "
        "is awaited takes 25.00 ms, and 27.00 ms without it.",
        "Rounds behind 4,096 tokens take at most 8.0 MiB beyond what is held where the next begins before the token is "
        "read, and 3.0 MiB where each is awaited: more is copied KV.",
        "Plain rounds: the pipeline takes 25.00 ms a token and mlx-lm's own loop 20.00 ms, 0.80 of its speed; the "
        "device is idle for 5.50 ms of each round.",
        "Rounds with guesses: the device is idle for 3.00 of 31.25 ms a round, 1.00 ms for messages and decisions and "
        "2.00 ms while the forward is built.",
    ]
    assert [row[3] for row in found.tables[0].rows] == [None, 2.5, None, 2.0, None, None, None, 5.5, 3.0]


# The page --------------------------------------------------------------------------------------------


def report() -> LightReport:
    found = Findings(
        values=(Value("gain <b>", 1.25, "× & more"),),
        tables=(
            Table("Times", ("tokens", "ms"), ((1, 1.5), (2, 3.0)), "note"),
            Table("Empty", ("a", "b"), (("x", None),)),
        ),
        checks=(Check("OpenBLAS", "warn", "not found", "install it"),),
        answers=(Answer("all", "Nothing & all."),),
    )
    stages = (
        StageReport(stage="a", title="First", status="done", seconds=3.0, findings=found),
        StageReport(stage="b", title="Second", status="not here", reason="no Neural Engine"),
        StageReport(stage="c", title="Third", status="failed", reason="<script>alert(1)</script>"),
    )
    asked = [Question(name, stage, f"{name}?") for name, stage in zip(("all", "none", "some"), "abc", strict=True)]
    made = {"program": "p 1", "machine": ("chip",), "options": ("short: True",), "began": "now"}
    return LightReport(**made, questions=tuple(question_rows(asked, stages)), stages=stages)


def test_the_page_shows_what_was_found_and_needs_nothing_from_elsewhere_and_runs_no_script():
    text = page(report())

    assert not re.search(r"<(script|link|img|iframe)|https?://|url\(|@import", text)
    assert re.findall(r'(?:src|href)="([^"]*)"', text) == ["#a", "#b", "#c"]
    shown = ("Nothing &amp; all.", "<td>1.25</td><td", "× &amp; more", "not here: no Neural Engine", "&lt;script&gt;")
    shown += ("next: install it", '<td class="text absent">no Neural Engine</td>')
    assert [words for words in shown if words not in text] == []
