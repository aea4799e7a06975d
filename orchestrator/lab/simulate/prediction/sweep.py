"""Sweeps of a scenario over the values of one quantity. Pure."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec

from orchestrator.core.options import Options
from orchestrator.lab.simulate.devices import Wires, stretched
from orchestrator.lab.simulate.prediction.plan import Prediction, Scenario, baseline_prediction, simulated
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
