"""Laws of the bench's pictures: what is drawn follows from the rows, and a sweep has a point and a whisker a K."""

from typing import Any

import pytest
from matplotlib.figure import Figure

from orchestrator.lab.bench.figures import rows
from orchestrator.lab.bench.plan import BenchPlan
from orchestrator.lab.bench.strategies import findings
from orchestrator.lab.findings import Findings, Panel
from orchestrator.lab.report import draw, looks_of
from tests.support.bench_measurements import measurement

_NAMES = ["mlx-lm", "mlx-lm K=1", "mlx-lm K=2", "ar", "ssd K=1", "ssd K=2", "ssd K=4", "adaptive"]
_PLAN = BenchPlan.of(
    draft_tokens="1", strategies="ar", temperature=(0.0,), target=None, draft=None, repeats=1, max_tokens=8
)


def _rows(temperatures: tuple[float, ...] = (0.0,), wrong: str = ""):
    found = [
        measurement(name, (10.0 + index) * (1 + prompt / 10), prompt, temperature=temperature,
                    tokens=(9,) if name == wrong else (1,))
        for temperature in temperatures
        for prompt in range(7)
        for index, name in enumerate(_NAMES)
    ]  # fmt: skip
    return rows(found, _NAMES)


def _found(figures) -> Findings:
    return findings(figures, _PLAN, 7)


def _drawn(panel: Panel) -> Any:
    axes = Figure().add_subplot()
    draw(axes, panel, looks_of([panel]))
    return axes


def _curves(axes: Any) -> dict[str, Any]:
    """Lines with whiskers by their labels."""
    return {container.get_label(): container for container in axes.containers}


def test_a_sweep_over_k_has_a_point_a_k_for_every_line():
    found = _rows()
    _, (sweep,) = _found(found).panels

    curves = _curves(_drawn(sweep))

    assert set(curves) == {"mlx-lm", "ssd"}
    line, _, (whiskers,) = curves["ssd"]
    assert line.get_ydata().tolist() == [row.tokens_per_second for row in found if row.contender.startswith("ssd")]
    assert [round(place) for place in line.get_xdata()] == [1, 2, 4]
    bounds = [tuple(segment[:, 1].tolist()) for segment in whiskers.get_segments()]
    quartiles = [row.quartiles for row in found if row.contender.startswith("ssd")]
    assert bounds == [pytest.approx(tuple(each)) for each in quartiles]


def test_a_wrong_contender_has_no_point_and_no_bar():
    (bars,), (sweep,) = _found(_rows(wrong="ssd K=2")).panels

    line, *_ = _curves(_drawn(sweep))["ssd"]
    assert [round(place) for place in line.get_xdata()] == [1, 4]
    assert [bar.mark for bar in bars.bars if bar.name == "ssd K=2"] == ["WRONG"]


def test_a_sweep_over_temperature_has_the_paired_ratio_to_plain_decoding_and_its_interval():
    _, _, (sweep,) = _found(_rows((0.0, 0.7, 1.0))).panels

    curves = _curves(_drawn(sweep))
    assert set(curves) == {"mlx-lm, best K", "ar", "ssd, best K", "adaptive"}
    line, *_ = curves["adaptive"]
    assert line.get_xdata().tolist() == [0.0, 0.7, 1.0]
    assert line.get_ydata().tolist() == pytest.approx([1.7, 1.7, 1.7])
