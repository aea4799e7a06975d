"""What the state machine does in a round does not grow with the context."""

import tracemalloc

from orchestrator.core.machine import Machine
from orchestrator.core.options import Options
from orchestrator.lab.simulate.acceptance import AcceptanceModel, ModelledLanguage
from orchestrator.lab.simulate.devices import Devices
from orchestrator.machine.profiles.device_profiles import load_profile
from tests.support.simulation import modelled_pipeline

_PROMPT = 40_000
_POINTER_BYTES = 8


def test_no_round_copies_the_context():
    language = ModelledLanguage(AcceptanceModel(accept=0.8), seed=1, prompt_tokens=_PROMPT)
    devices = Devices.of(load_profile("m4-16gb-qwen2.5-3b"))
    simulation = modelled_pipeline(Options(), language, devices, seed=1, kept=None)
    simulation.submit(1, 300)
    simulation.run()
    events = [(event, now) for now, event, _ in simulation.history]
    machine, decoding = Machine(Options()), len(events) * 3 // 4
    for event, now in events[:decoding]:
        machine.step(event, now).all()

    tracemalloc.start()
    try:
        most = 0
        for event, now in events[decoding:-1]:
            tracemalloc.reset_peak()
            held, _ = tracemalloc.get_traced_memory()
            machine.step(event, now).all()
            most = max(most, tracemalloc.get_traced_memory()[1] - held)
    finally:
        tracemalloc.stop()

    assert 0 < most < _PROMPT * _POINTER_BYTES / 2
