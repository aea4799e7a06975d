"""Predictions as findings: of a plan, and of a sweep."""

from collections.abc import Sequence
from typing import Any

import msgspec

from orchestrator.lab.findings import Bar, Column, Field, Findings, Line, Panel, Table, tabulated
from orchestrator.lab.simulate.prediction.plan import BASELINE_NAME, ORACLE, PLAIN_NAME, Prediction, Scenario
from orchestrator.lab.simulate.prediction.sweep import SWEEPS, Point
from orchestrator.lab.simulate.trace import coverage
from orchestrator.machine.profiles.device_profiles import DeviceProfile

_MIN_GAIN = 1.1


def plan_findings(
    profile: DeviceProfile, plans: Sequence[tuple[Scenario, Sequence[Prediction], float | None]]
) -> Findings:
    """Scenarios with their predictions, and the acceptance from which a draft pays."""
    return Findings(
        title=f"Predicted for {profile.name}",
        conditions=(_heading(profile),),
        tables=tuple(_plan_table(*plan) for plan in plans),
        panels=(tuple(_bars(scenario, predictions) for scenario, predictions, _ in plans),),
        figures={
            "profile": profile.name,
            "plans": [
                {**_circumstances(scenario), "pays_from_acceptance": threshold, "predictions": _json(predictions)}
                for scenario, predictions, threshold in plans
            ],
        },
    )


def sweep_findings(profile: DeviceProfile, name: str, sweeps: Sequence[tuple[Scenario, Sequence[Point]]]) -> Findings:
    """Tokens a second by the values of `name`."""
    return Findings(
        title=f"Predicted for {profile.name}",
        conditions=(_heading(profile),),
        tables=tuple(_sweep_table(name, scenario, points) for scenario, points in sweeps),
        panels=(tuple(_lines(name, scenario, points) for scenario, points in sweeps),),
        figures={
            "profile": profile.name,
            "sweeps": [
                {
                    **_circumstances(scenario),
                    "sweep": {
                        "of": name,
                        "unit": SWEEPS[name].unit,
                        "points": [{"value": point.value, "predictions": _json(point.predictions)} for point in points],
                    },
                }
                for scenario, points in sweeps
            ],
        },
    )


def _plan_table(scenario: Scenario, predictions: Sequence[Prediction], pays_from: float | None) -> Table:
    plain = next(one.tokens_per_second for one in predictions if one.contender == PLAIN_NAME)
    spec = next((one.tokens_per_second for one in predictions if one.contender.startswith(BASELINE_NAME)), None)
    fields: list[Field[Prediction]] = [
        Field("contender", lambda one: one.contender),
        Field("tok/s", lambda one: one.tokens_per_second, ".1f"),
        Field("x mlx-lm", lambda one: one.tokens_per_second / plain, ".2f"),
        Field("x its spec", lambda one: spec and one.tokens_per_second / spec, ".2f"),
        Field("tok/round", lambda one: one.tokens_per_round, ".2f"),
        Field("hit", lambda one: one.hit_rate, ".0%"),
        Field("accept", lambda one: one.acceptance_rate, ".0%"),
        Field("target", lambda one: one.target_busy, ".0%"),
        Field("draft", lambda one: one.draft_busy, ".0%"),
    ]
    note = f"{_verdict(predictions, pays_from)} {_source(scenario)}"
    table = tabulated(_title(scenario), fields, predictions, note=note)
    return msgspec.structs.replace(table, origin="computed")


def _sweep_table(name: str, scenario: Scenario, points: Sequence[Point]) -> Table:
    curves = _curves(points)
    rows = zip((point.value for point in points), *curves.values(), strict=True)
    columns = (Column(_label(name), "g"), *(Column(contender, ".1f") for contender in curves))
    return Table(f"tokens/s, {_title(scenario)}", columns, tuple(rows), origin="computed")


def _bars(scenario: Scenario, predictions: Sequence[Prediction]) -> Panel:
    speeds = [(one.contender, one.tokens_per_second) for one in predictions]
    bars = tuple(
        Bar(name, speed, speed, speed, baseline=name.startswith(PLAIN_NAME), hypothetical=name.startswith(ORACLE))
        for name, speed in speeds
    )
    return Panel(title=_title(scenario), x="tokens/s", bars=bars)


def _lines(name: str, scenario: Scenario, points: Sequence[Point]) -> Panel:
    lines = tuple(
        Line(
            contender,
            tuple((point.value, speed) for point, speed in zip(points, speeds, strict=True)),
            baseline=contender.startswith(PLAIN_NAME),
        )
        for contender, speeds in _curves(points).items()
    )
    return Panel(title=_title(scenario), x=_label(name), y="tokens/s", lines=lines)


def _verdict(predictions: Sequence[Prediction], pays_from: float | None) -> str:
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


def _curves(points: Sequence[Point]) -> dict[str, list[float]]:
    """Tokens/s by contender. The speculative baseline is one curve over all numbers of draft tokens."""
    curves: dict[str, list[float]] = {}
    for point in points:
        for prediction in point.predictions:
            name = BASELINE_NAME if prediction.contender.startswith(BASELINE_NAME) else prediction.contender
            curves.setdefault(name, []).append(prediction.tokens_per_second)
    return curves


def _json(predictions: Sequence[Prediction]) -> list[dict[str, Any]]:
    return [msgspec.to_builtins(prediction) for prediction in predictions]


def _circumstances(scenario: Scenario) -> dict[str, Any]:
    acceptance = scenario.acceptance
    return {
        "temperature": scenario.temperature,
        "level": scenario.level,
        "source": "recorded" if scenario.recorded else "modelled",
        "coverage": coverage(scenario.recorded) if scenario.recorded else None,
        "acceptance": acceptance.accept,
        "exponent": acceptance.exponent,
        "spread": acceptance.spread,
        "independent": acceptance.independent,
    }


def _heading(profile: DeviceProfile) -> str:
    return f"Predicted for {profile.name}: {profile.description}."


def _title(scenario: Scenario) -> str:
    return f"temperature {scenario.temperature:g}"


def _label(name: str) -> str:
    unit = SWEEPS[name].unit
    return f"{name} ({unit})" if unit else name


def _source(scenario: Scenario) -> str:
    acceptance = scenario.acceptance
    if scenario.recorded:
        return f"Replayed; the draft's guesses are known for {coverage(scenario.recorded):.0%} of the tokens."
    return (
        f"Modelled: best guess right {acceptance.accept:.0%}, exponent {acceptance.exponent:g}, spread "
        f"{acceptance.spread:g}."
    )
