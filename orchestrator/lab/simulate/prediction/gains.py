"""Simulates the gains that `pairs` forecasts with, and writes the table that is shipped.

python -m orchestrator.lab.simulate.prediction.gains
"""

from pathlib import Path

import msgspec

from orchestrator.lab.simulate.devices import Devices
from orchestrator.lab.simulate.prediction.plan import Scenario, plain, simulated
from orchestrator.machine.pairs import expectations
from orchestrator.machine.pairs.expectations import Gains
from protocol.worker.pacing import DevicePace

FILE = Path(expectations.__file__).with_name("gains.json")
DRAFT = (0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
WIDE = (1.0, 1.1, 1.3, 1.7, 2.5, 5.0)
SLOW_DOWN = (1.0, 1.3, 2.0)
_SECONDS = 0.02
_TOKENS, _REQUESTS = 128, 2


def gain(draft: float, wide: float, slow_down: float) -> float:
    """At one point of the table's axes."""
    target = DevicePace(steps=((1, _SECONDS), (8, _SECONDS * wide)), prefill_rate=800.0)
    steps = ((1, _SECONDS * draft), (8, 1.1 * _SECONDS * draft))
    pace = DevicePace(steps=steps, prefill_rate=4000.0)
    devices = Devices(target=target, draft=pace, baseline_draft=pace, slow_down=slow_down)
    scenario = Scenario(devices=devices, requests=_REQUESTS, tokens=_TOKENS)
    return round(simulated(scenario, "adaptive").tokens_per_second / plain(scenario).tokens_per_second, 3)


def table() -> Gains:
    """Takes about two minutes."""
    times = tuple(tuple(tuple(gain(draft, wide, slow) for slow in SLOW_DOWN) for wide in WIDE) for draft in DRAFT)
    return Gains(draft=DRAFT, wide=WIDE, slow_down=SLOW_DOWN, times=times)


if __name__ == "__main__":
    FILE.write_bytes(msgspec.json.encode(table()) + b"\n")
