"""Laws of the bench's pictures: what is drawn follows from the rows, and a sweep has a point and a whisker a K."""

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from orchestrator.lab.bench.results.figures import best_of_each_line, rows
from orchestrator.lab.bench.results.plot import draw
from orchestrator.lab.bench.results.sweep_plot import (
    draw_draft_token_sweep,
    draw_temperature_sweep,
    has_draft_token_sweep,
    styles_of,
)
from tests.support.bench_measurements import measurement

_NAMES = ["mlx-lm", "mlx-lm K=1", "mlx-lm K=2", "ar", "ssd K=1", "ssd K=2", "ssd K=4", "adaptive"]


def _rows(temperatures: tuple[float, ...] = (0.0,), wrong: str = ""):
    found = [
        measurement(name, (10.0 + index) * (1 + prompt / 10), prompt, temperature=temperature,
                    tokens=(9,) if name == wrong else (1,))
        for temperature in temperatures
        for prompt in range(7)
        for index, name in enumerate(_NAMES)
    ]  # fmt: skip
    return rows(found, _NAMES)


def _panel() -> Any:
    return Figure().add_subplot()


def _curves(panel: Any) -> dict[str, Any]:
    """Lines with whiskers by their labels."""
    return {container.get_label(): container for container in panel.containers}


def test_a_sweep_over_k_has_a_point_a_k_for_every_line():
    panel, found = _panel(), _rows()

    draw_draft_token_sweep(panel, found, styles_of(found))

    curves = _curves(panel)
    assert set(curves) == {"mlx-lm", "ssd"}
    line, _, (whiskers,) = curves["ssd"]
    assert line.get_ydata().tolist() == [row.tokens_per_second for row in found if row.contender.startswith("ssd")]
    assert [round(place) for place in line.get_xdata()] == [1, 2, 4]
    bounds = [tuple(segment[:, 1].tolist()) for segment in whiskers.get_segments()]
    quartiles = [row.quartiles for row in found if row.contender.startswith("ssd")]
    assert bounds == [pytest.approx(tuple(each)) for each in quartiles]


def test_contenders_without_a_k_are_levels_in_the_sweep():
    panel, found = _panel(), _rows()

    draw_draft_token_sweep(panel, found, styles_of(found))

    _, labels = panel.get_legend_handles_labels()
    assert {"mlx-lm, no K", "ar, no K", "adaptive, no K"} <= set(labels)
    assert panel.get_xlabel() == "K, draft tokens a round"
    assert panel.get_ylabel() == "tokens/s"


def test_a_wrong_contender_has_no_point():
    panel, found = _panel(), _rows(wrong="ssd K=2")

    draw_draft_token_sweep(panel, found, styles_of(found))

    line, *_ = _curves(panel)["ssd"]
    assert [round(place) for place in line.get_xdata()] == [1, 4]


def test_a_sweep_over_temperature_has_the_paired_ratio_to_plain_decoding_and_its_interval():
    panel, found = _panel(), _rows((0.0, 0.7, 1.0))
    best = best_of_each_line(found)

    draw_temperature_sweep(panel, best, styles_of(found))

    curves = _curves(panel)
    assert set(curves) == {"mlx-lm, best K", "ar", "ssd, best K", "adaptive"}
    line, *_ = curves["adaptive"]
    assert line.get_xdata().tolist() == [0.0, 0.7, 1.0]
    assert line.get_ydata().tolist() == pytest.approx([1.7, 1.7, 1.7])


def test_one_number_of_draft_tokens_is_no_sweep():
    assert has_draft_token_sweep(_rows())
    assert not has_draft_token_sweep([row for row in _rows() if row.draft_tokens in (None, 2)])


def test_a_line_has_one_style_and_no_two_of_ours_the_same():
    styles = styles_of(_rows())

    assert list(styles) == ["mlx-lm", "ar", "ssd", "adaptive"]
    assert len({style["color"] for style in styles.values()}) == len(styles)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("temperatures", [(0.0,), (0.0, 1.0), (0.0, 0.3, 0.7, 1.0)])
def test_every_sweep_is_one_picture(tmp_path: Path, temperatures: tuple[float, ...]):
    draw(_rows(temperatures), "a sweep", tmp_path / "sweep.png")

    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
