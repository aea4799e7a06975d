"""A profile as TOML that `load_profile` reads back. Pure."""

import json

from orchestrator.machine.device_profiles import DeviceProfile, DeviceTimes, ForwardTime, PrefillRate, SlowDown
from orchestrator.tools.calibration.measure import Times


def device_times(times: Times, source: str, weights: int | None = None) -> DeviceTimes:
    """What was measured, each number with the same source, of a model with so many bytes of weights."""
    steps = tuple(
        ForwardTime(width=width, milliseconds=round(seconds * 1000, 4), source=source)
        for width, seconds in sorted(times.steps.items())
    )
    rate = PrefillRate(tokens_per_second=round(times.prefill_rate, 1), source=source)
    return DeviceTimes(prefill=rate, steps=steps, weights=weights)


def slowed(factor: float, source: str) -> SlowDown:
    return SlowDown(factor=round(factor, 3), source=source)


def to_toml(profile: DeviceProfile) -> str:
    """The file's content."""
    lines = [f"name = {_text(profile.name)}", f"description = {_text(profile.description)}"]
    for name in ("target", "draft", "draft_on_target_device"):
        lines += ["", f"[{name}]", *_device(getattr(profile, name))]
    slow_down = profile.both_busy
    lines += ["", "[both_busy]", f"factor = {slow_down.factor}", f"source = {_text(slow_down.source)}"]
    return "\n".join(lines) + "\n"


def _device(times: DeviceTimes) -> list[str]:
    prefill = times.prefill
    rate = f"tokens_per_second = {prefill.tokens_per_second}, source = {_text(prefill.source)}"
    steps = [
        f"    {{ width = {step.width}, milliseconds = {step.milliseconds}, source = {_text(step.source)} }},"
        for step in times.steps
    ]
    weights = [] if times.weights is None else [f"weights = {times.weights}"]
    return [*weights, f"prefill = {{ {rate} }}", "steps = [", *steps, "]"]


def _text(value: str) -> str:
    """A basic string: JSON's escapes are TOML's."""
    return json.dumps(value, ensure_ascii=False)
