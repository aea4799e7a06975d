"""Laws of what is shown: overlap by its formulas, reports of every kind, a page that needs nothing else."""

import re
import sys
from pathlib import Path

import pytest

from orchestrator.lab.findings import Findings, Table, Value
from orchestrator.lab.first_light.forwards import Compared
from orchestrator.lab.first_light.measurements import neural_engine, widths
from orchestrator.lab.first_light.measurements.overlap import Overlap, efficiency
from orchestrator.lab.first_light.report import LightReport, StageReport, page
from orchestrator.lab.first_light.stages import Asked, LightSettings
from orchestrator.machine.check import Check
from protocol.contracts.coreml.neural_engine import ExaminedSystem

FAKE = (sys.executable, "-m", "tests.support.fake_examiner")


def test_the_efficiency_that_was_reported_for_an_m4_is_this_formula():
    draft = 1000 / 137

    assert efficiency(22.1 - draft, draft, 16.8) == pytest.approx(0.73, abs=0.005)


def test_devices_that_do_not_slow_each_other_hide_the_shorter_step():
    overlap = Overlap(20.0, 7.0, 20.0, 7.0)

    assert overlap.pair_seconds == 20.0
    assert (overlap.efficiency, overlap.gain) == (1.0, 2.0)
    assert overlap.pair_speed_up == 1.35


def test_one_device_for_both_wins_nothing():
    overlap = Overlap(20.0, 8.0, 40.0, 16.0)

    assert overlap.pair_seconds == pytest.approx(28.0)
    assert (overlap.efficiency, overlap.gain, overlap.pair_speed_up) == pytest.approx((0.0, 1.0, 1.0))


def test_the_longer_step_runs_alone_once_the_shorter_has_ended():
    # 8 ms beside the draft do 4 ms of the target's 20: 16 more remain.
    overlap = Overlap(20.0, 4.0, 40.0, 8.0)

    assert overlap.pair_seconds == pytest.approx(8.0 + 16.0)


def test_an_examination_shows_every_kind_of_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(neural_engine, "converted_draft", lambda *_: tmp_path)
    monkeypatch.setattr(neural_engine, "place_of", lambda _: ExaminedSystem("macOS 25A1", "Apple M9", "f" * 64))
    found = neural_engine.examination(Asked(LightSettings(short=True), lambda _: None), "executor", FAKE)
    titles = [table.title for table in found.tables]

    assert titles == [
        "CPU_AND_NE, predict: agreed",
        "CPU_AND_NE, predict: predicted",
        "CPU_AND_NE, predict: timed",
        "CPU_ONLY, predict: agreed",
        "CPU_ONLY, predict: predicted",
        "CPU_ONLY, predict: timed",
        "CPU_AND_NE, plan: placed",
    ]
    assert [table.rows for table in found.tables if table.title.endswith("timed")] == [((8, 7.0),), ((8, 30.0),)]
    assert [value.unit for value in found.values] == ["MiB"]
    assert found.checks[-1] == Check("verdict", "ok", "coreml: all that was examined is as it should be")


@pytest.mark.parametrize(
    ("flips", "gap", "gpu", "status"),
    [(0, None, True, "ok"), (2, 0.01, True, "warn"), (2, 0.01, False, "fail"), (1, 0.9, True, "fail")],
)
def test_only_a_near_tie_may_fall_otherwise_and_only_on_a_gpu(flips: int, gap: float | None, gpu: bool, status: str):
    found = widths.check("stored", [Compared(5, "chain", 100, 0.2, flips, gap)], gpu)

    assert found.status == status
    assert f"{flips} of 100" in found.text


# The page --------------------------------------------------------------------------------------------


def report() -> LightReport:
    rows = tuple((width, 1.5 * width) for width in (1, 2, 4, 8))
    found = Findings(
        values=(Value("gain <b>", 1.25, "×", "computed", "a & b"),),
        tables=(Table("Times", ("tokens", "ms"), (*rows,), "note"), Table("Empty", ("a", "b"), (("x", None),))),
        checks=(Check("OpenBLAS", "warn", "not found", "install it"),),
    )
    stages = (
        StageReport(stage="a", title="First", status="done", seconds=3.0, findings=found),
        StageReport(stage="b", title="Second", status="not here", reason="no Neural Engine"),
        StageReport(stage="c", title="Third", status="failed", reason="<script>alert(1)</script>"),
    )
    return LightReport(program="p 1", machine=("chip",), options=("short: True",), began="now", stages=stages)


def test_the_page_needs_nothing_from_elsewhere_and_runs_no_script():
    text = page(report())

    assert not re.search(r"<(script|link|img|iframe)|https?://|url\(|@import", text)
    assert re.findall(r'(?:src|href)="([^"]*)"', text) == ["#a", "#b", "#c"]


def test_the_page_shows_units_origins_pictures_and_what_is_not_here():
    text = page(report())

    assert "<td>1.25</td><td" in text
    assert ">computed<" in text
    assert text.count("<svg") == 1
    assert "not here: no Neural Engine" in text
    assert "&lt;script&gt;" in text
    assert "next: install it" in text
