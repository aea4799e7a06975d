"""Predictions as a table, a sentence, JSON and a picture."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from orchestrator.lab.simulate.prediction.plan import BASELINE_NAME, PLAIN_NAME, Prediction
from orchestrator.lab.simulate.prediction.sweep import SWEEPS, Point

_TITLES = ("tok/s", "x mlx-lm", "x its spec", "tok/round", "hit", "accept", "target", "draft")
_MIN_GAIN = 1.1
_SIZE = (8.0, 4.5)


def table(temperature: float, predictions: Sequence[Prediction]) -> Table:
    """One row a contender."""
    found = Table(title=f"temperature {temperature:g}", title_justify="left", box=None, padding=(0, 1, 0, 0))
    found.add_column("contender", no_wrap=True)
    for title in _TITLES:
        found.add_column(title, justify="right", no_wrap=True)
    for prediction in predictions:
        found.add_row(prediction.contender, *_cells(prediction, predictions))
    return found


def sweep_table(name: str, temperature: float, points: Sequence[Point]) -> Table:
    """Tokens a second, one row a value."""
    found = Table(
        title=f"tokens/s by {_label(name)}, temperature {temperature:g}",
        title_justify="left",
        box=None,
        padding=(0, 2, 0, 0),
    )
    found.add_column(name, justify="right")
    for contender in _curves(points):
        found.add_column(contender, justify="right")
    for point in points:
        found.add_row(f"{point.value:g}", *(f"{one.tokens_per_second:.1f}" for one in point.predictions))
    return found


def sentence(predictions: Sequence[Prediction], pays_from: float | None) -> str:
    """Whether a draft would pay, and the acceptance that it needs."""
    speed = {prediction.contender: prediction.tokens_per_second for prediction in predictions}
    gain = speed["adaptive"] / speed["ar"]
    figures = f"{speed['adaptive']:.1f} tokens/s with it, {speed['ar']:.1f} without, {gain:.2f} times"
    verdict = "A draft would pay" if gain >= _MIN_GAIN else "A draft would hardly pay"
    if pays_from is None:
        return f"{verdict}: {figures}. A draft this slow would not, at any acceptance."
    return (
        f"{verdict}: {figures}. A draft this fast pays if its best guess is right in at least {pays_from:.0%} of cases."
    )


def to_json(predictions: Sequence[Prediction]) -> list[dict[str, Any]]:
    return [msgspec.to_builtins(prediction) for prediction in predictions]


def sweep_json(name: str, points: Sequence[Point]) -> dict[str, Any]:
    return {
        "of": name,
        "unit": SWEEPS[name].unit,
        "points": [{"value": point.value, "predictions": to_json(point.predictions)} for point in points],
    }


def plot_sweep(path: Path, name: str, sweeps: Sequence[tuple[float, Sequence[Point]]]) -> None:
    """A panel a temperature, a curve a contender."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_SIZE[0] * max(1.0, 0.75 * len(sweeps)), _SIZE[1]), layout="constrained")
    panels = figure.subplots(1, len(sweeps), squeeze=False)[0]
    for panel, (temperature, points) in zip(panels, sweeps, strict=True):
        for contender, speeds in _curves(points).items():
            panel.plot([point.value for point in points], speeds, marker="o", markersize=4, label=contender)
        panel.set(title=f"temperature {temperature:g}", xlabel=_label(name), ylabel="tokens/s")
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
        panel.legend()
    figure.savefig(path, dpi=150)


def plot(path: Path, tables: Sequence[tuple[float, Sequence[Prediction]]]) -> None:
    """A panel a temperature, a bar a contender."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_SIZE[0] * max(1.0, 0.75 * len(tables)), _SIZE[1]), layout="constrained")
    panels = figure.subplots(1, len(tables), squeeze=False)[0]
    for panel, (temperature, predictions) in zip(panels, tables, strict=True):
        shown = predictions[::-1]
        bars = panel.barh(
            [prediction.contender for prediction in shown],
            [prediction.tokens_per_second for prediction in shown],
            color=["#9aa0a6" if prediction.contender.startswith(PLAIN_NAME) else "#3367d6" for prediction in shown],
        )
        panel.bar_label(bars, fmt="%.1f", padding=3)
        panel.margins(x=0.12)
        panel.set(title=f"temperature {temperature:g}", xlabel="tokens/s")
    figure.savefig(path, dpi=150)


def _cells(prediction: Prediction, predictions: Sequence[Prediction]) -> Iterator[str]:
    speed = prediction.tokens_per_second
    plain = next(one.tokens_per_second for one in predictions if one.contender == PLAIN_NAME)
    spec = next((one.tokens_per_second for one in predictions if one.contender.startswith(BASELINE_NAME)), None)
    yield f"{speed:.1f}"
    yield f"{speed / plain:.2f}"
    yield "-" if spec is None else f"{speed / spec:.2f}"
    yield f"{prediction.tokens_per_round:.2f}"
    for share in (prediction.hit_rate, prediction.acceptance_rate, prediction.target_busy, prediction.draft_busy):
        yield "-" if share is None else f"{share:.0%}"


def _curves(points: Sequence[Point]) -> dict[str, list[float]]:
    """Tokens/s by contender. The speculative baseline is one curve over all numbers of draft tokens."""
    curves: dict[str, list[float]] = {}
    for point in points:
        for prediction in point.predictions:
            name = BASELINE_NAME if prediction.contender.startswith(BASELINE_NAME) else prediction.contender
            curves.setdefault(name, []).append(prediction.tokens_per_second)
    return curves


def _label(name: str) -> str:
    unit = SWEEPS[name].unit
    return f"{name} ({unit})" if unit else name
