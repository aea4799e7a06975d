"""Changes of a scenario: sweeps over the values of one quantity, and trained drafters as they are published. Pure.

Parameters of a drafter are those for Qwen3-8B, whose forward reads 7.57 billion: width 4,096, a layer of 193 million
with 12,288 rows in its feed-forward part, a head of 151,936 rows. They depend on the shapes of the published formats
alone. A step reads them in the precision of the target's weights: a drafter in 16 bits beside a target in 4 bits takes
up to four times as long, which `--draft-ms` can say.

Acceptances are means over depths of the published shares of right guesses behind right ones, on chat unless the source
says otherwise, with the features of every token before: what an asynchronous draft reaches is lower.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import msgspec

from orchestrator.core.options import Options
from orchestrator.lab.findings import Bar, Column, Field, Findings, Line, Panel, Table, tabulated
from orchestrator.lab.simulate.devices import Wires, stretched
from orchestrator.lab.simulate.prediction.plan import (
    BASELINE_NAME,
    ORACLE,
    PLAIN_NAME,
    Prediction,
    Scenario,
    baseline_prediction,
    simulated,
)
from orchestrator.lab.simulate.trace import coverage
from orchestrator.machine.profiles.device_profiles import DeviceProfile, profile_names
from protocol.contracts.drafters.description import DrafterKind
from protocol.errors import InputError


@dataclass(frozen=True, slots=True)
class Sweep:
    """A quantity, its unit, its default values, and the function that sets it in a scenario."""

    unit: str
    values: tuple[float, ...]
    change: Callable[[Scenario, float], Scenario]


@dataclass(frozen=True, slots=True)
class Point:
    """The predictions at one value."""

    value: float
    predictions: tuple[Prediction, ...]


def sweep(scenario: Scenario, name: str, values: Sequence[float] = ()) -> Iterator[Point]:
    """A point for each value. Raises InputError for an invalid value."""
    chosen = SWEEPS[name]
    for value in values or chosen.values:
        try:
            changed = chosen.change(scenario, value)
        except (ValueError, msgspec.ValidationError) as error:
            raise InputError(f"{name} can't be {value:g}: {error}.") from error
        ours = [simulated(changed, strategy) for strategy in ("ar", "sd", "ssd", "adaptive")]
        yield Point(value, (*baseline_prediction(changed), *ours))


def with_draft_step(scenario: Scenario, milliseconds: float) -> Scenario:
    """A draft with this time for a step over one token, on both devices; other widths in proportion."""
    devices = scenario.devices
    factor = _positive(milliseconds) / 1000 / devices.draft.forward(1)
    changed = replace(
        devices, draft=stretched(devices.draft, factor), baseline_draft=stretched(devices.baseline_draft, factor)
    )
    return replace(scenario, devices=changed)


def with_target_step(scenario: Scenario, milliseconds: float) -> Scenario:
    """A target with this time for a forward over one token; other widths in proportion."""
    devices = scenario.devices
    factor = _positive(milliseconds) / 1000 / devices.target.forward(1)
    return replace(scenario, devices=replace(devices, target=stretched(devices.target, factor)))


def with_acceptance(scenario: Scenario, accept: float) -> Scenario:
    """A draft with this acceptance of its best guess; independent draws agree in proportion."""
    if not 0.0 <= accept <= 1.0:
        raise ValueError("an acceptance is between 0 and 1")
    known = scenario.acceptance
    independent = known.independent
    if independent is not None:
        independent = min(1.0, independent * accept / max(known.accept, 1e-9))
    return replace(scenario, recorded=(), acceptance=replace(known, accept=accept, independent=independent))


def with_draft_delay(scenario: Scenario, milliseconds: float) -> Scenario:
    """A draft on another machine with this delay each way; it shares no memory bandwidth with the target."""
    if milliseconds < 0:
        raise ValueError("a delay is not negative")
    wires = scenario.wires
    apart = replace(scenario.devices, slow_down=1.0)
    return replace(scenario, devices=apart, wires=Wires(wires.target, replace(wires.draft, delay=milliseconds / 1000)))


def _with_option(name: str) -> Callable[[Scenario, float], Scenario]:
    def change(scenario: Scenario, value: float) -> Scenario:
        whole = int(value) if value == int(value) else value
        options = msgspec.convert(msgspec.to_builtins(scenario.options) | {name: whole}, Options)
        return replace(scenario, options=options)

    return change


def _positive(milliseconds: float) -> float:
    if milliseconds <= 0:
        raise ValueError("a forward takes some time")
    return milliseconds


SWEEPS: dict[str, Sweep] = {
    "acceptance": Sweep("", (0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 0.95), with_acceptance),
    "draft-ms": Sweep("ms", (1, 2, 4, 6, 8, 12, 16, 24, 32), with_draft_step),
    "target-ms": Sweep("ms", (5, 10, 20, 40, 80, 160), with_target_step),
    "draft-tokens": Sweep("", (1, 2, 3, 4, 5, 6, 7, 8), _with_option("draft_tokens")),
    "draft-width": Sweep("", (1, 2, 4, 8, 16, 32), _with_option("draft_width")),
    "max-verify": Sweep("", (1, 2, 4, 8, 16, 32), _with_option("max_verify")),
    "draft-delay": Sweep("ms each way", (0.15, 0.3, 1, 2, 5, 10, 25, 50), with_draft_delay),
}


_TARGET = 7.57
"""Billions of parameters that a forward of Qwen3-8B reads."""
_LAYER, _HEAD = 0.193, 0.622


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelledDrafter:
    read: float
    """Billions of parameters of a growth step: layers and head."""
    accept: float | None
    """How often a guess is right whose parent is right; None: not published, so that of the demo pair's draft."""
    source: str
    block: int = 1
    """Tokens that one forward guesses behind one another."""


DRAFTERS: Mapping[DrafterKind, ModelledDrafter] = MappingProxyType(
    {
        "eagle3": ModelledDrafter(
            read=0.35, accept=0.64, source="DSpark's paper (DeepSpec): 0.53 at depth 1 to 0.74 on chat; 32,000-row head"
        ),
        "peagle": ModelledDrafter(
            read=4 * _LAYER + _HEAD,
            accept=None,
            block=7,
            source="none by depth is published (at most 1.69 times EAGLE-3's speed); four layers and the whole head",
        ),
        "mtp": ModelledDrafter(
            read=_LAYER + 2 * 4096 * 4096 / 1e9 + _HEAD,
            accept=0.58,
            source="shares of rounds that reach depths 1 to 3 on chat: 0.70, 0.29, 0.18",
        ),
        "dflash": ModelledDrafter(
            read=5 * _LAYER + _HEAD,
            accept=0.67,
            block=7,
            source="DSpark's paper (DeepSpec): 0.72 at depth 1 to 0.63 on chat",
        ),
        "dflash2": ModelledDrafter(
            read=5 * _LAYER + _HEAD,
            accept=0.795,
            block=7,
            source="inco.ai/blog/dflash2, Qwen3.8-27B: 4.10 tokens a round of 7 guesses on MT-Bench, taken as the same "
            "at every depth (0.89 on GSM8K)",
        ),
        "dspark": ModelledDrafter(
            read=5 * _LAYER + _HEAD + 151_936 * 256 / 1e9,
            accept=0.76,
            block=7,
            source="DSpark's paper (DeepSpec), Qwen3-8B: 3.72 tokens a round of 7 guesses on MT-Bench, taken as the "
            "same at every depth (0.92 on GSM8K)",
        ),
        "exit": ModelledDrafter(
            read=9 * _LAYER + _HEAD, accept=None, source="none by depth is published; a quarter of the layers"
        ),
    }
)


def with_drafter(scenario: Scenario, kind: DrafterKind) -> Scenario:
    """This drafter beside the scenario's target: its step in proportion to the parameters read, and its acceptance."""
    drafter = DRAFTERS[kind]
    step = 1000 * scenario.devices.target.forward(1) * drafter.read / _TARGET
    changed = with_draft_step(scenario, step)
    if drafter.accept is not None and not scenario.recorded:
        changed = with_acceptance(changed, drafter.accept)
    return replace(changed, devices=replace(changed.devices, draft_block=drafter.block))


# Findings -----------------------------------------------------------------------------------------

_MIN_GAIN = 1.1


def plan_findings(
    profile: DeviceProfile, plans: Sequence[tuple[Scenario, Sequence[Prediction], float | None]]
) -> Findings:
    """Scenarios with their predictions, and the acceptance from which a draft pays."""
    return Findings(
        title=_heading(profile),
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
        title=_heading(profile),
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
    other = ", not for this machine" if profile.name in profile_names() else ""
    return f"Predicted for {profile.name} ({profile.description}){other}."


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
