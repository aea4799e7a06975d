"""Laws of energy: every joule of a sample counts once, and what is no sample is none.

The samples are made up. Their keys are those that graelo/pumas (src/parser/plist_parsing.rs) and tlkh/asitop
(asitop/parsers.py) read; powermetrics(1) says that a NUL stands between property lists.
"""

import os
import plistlib
import threading
import time
from types import SimpleNamespace

import pytest

from orchestrator.lab.first_light.measurements import energy
from orchestrator.lab.first_light.needs import RAPL
from orchestrator.lab.first_light.power_meter import (
    PlistStream,
    Powermetrics,
    PowerSample,
    ProcessorCounter,
    counted,
    energy_between,
    parsed,
)
from orchestrator.lab.first_light.stages import Asked, LightSettings
from protocol.errors import PipelineError

ENERGY = {"cpu_energy": 1500, "gpu_energy": 4000, "ane_energy": 250, "clusters": [], "package_energy": 5750}
POWER = {"cpu_power": 3000.0, "gpu_power": 8000.0, "ane_power": 500.0, "combined_power": 11500.0}
JOULES = {"cpu": 1.5, "gpu": 4.0, "ane": 0.25}


def sample(processor: dict) -> bytes:
    other = {"is_delta": True, "hw_model": "Mac16,1", "thermal_pressure": "Nominal", "gpu": {"freq_hz": 338.0}}
    return plistlib.dumps({**other, "elapsed_ns": 500_000_000, "processor": processor})


@pytest.mark.parametrize("processor", [ENERGY, POWER], ids=["millijoules", "milliwatts"])
def test_energy_and_power_are_the_same_joules(processor: dict):
    assert parsed(sample(processor), now=10.0) == PowerSample(10.0, 0.5, JOULES)


@pytest.mark.parametrize("piece", [1, 7, 500, 100_000])
@pytest.mark.parametrize("separated", ["before", "behind"])
def test_samples_are_found_however_the_output_is_cut(piece: int, separated: str):
    documents = [sample(ENERGY) for _ in range(3)]
    output = b"".join(b"\0" + one if separated == "before" else one + b"\0" for one in documents)
    stream = PlistStream()
    found = [each for begin in range(0, len(output), piece) for each in stream.feed(output[begin : begin + piece], 1.0)]

    assert [one.joules for one in found] == [JOULES] * 3


@pytest.mark.parametrize(
    "document",
    [b"", b"Password:", b"\n", b"<plist><dict>", plistlib.dumps({"elapsed_ns": 5}), sample({"clusters": []})],
)
def test_what_is_no_sample_is_none(document: bytes):
    assert parsed(document, now=0.0) is None


def test_a_sample_counts_by_the_share_that_lies_in_the_stretch():
    samples = [PowerSample(end, 1.0, {"cpu": 2.0, "gpu": 10.0}) for end in (1.0, 2.0, 3.0, 4.0)]

    assert energy_between(samples, 1.5, 3.25) == pytest.approx({"cpu": 3.5, "gpu": 17.5})
    assert energy_between(samples, 0.0, 4.0) == {"cpu": 8.0, "gpu": 40.0}
    assert energy_between(samples, 5.0, 6.0) == {"cpu": 0.0, "gpu": 0.0}


def test_a_counter_that_began_again_still_counts():
    assert counted(1_000_000, 4_000_000, 9_000_000) == 3.0
    assert counted(8_000_000, 1_000_000, 9_000_000) == 2.0


def test_a_processors_counter_is_read_at_both_ends(tmp_path):
    counter_file = tmp_path / RAPL.name
    (tmp_path / "max_energy_range_uj").write_text("262143328850\n")
    counter_file.write_text("5000000\n")
    counter = ProcessorCounter(counter_file)
    begin = counter.mark()
    counter_file.write_text("12000000\n")
    end = counter.mark()

    assert counter.between(begin, end) == {"package": 7.0}


def test_a_meter_reads_what_a_process_writes_until_it_ends():
    reading, writing = os.pipe()
    meter = Powermetrics(reading)
    os.write(writing, sample(ENERGY) + b"\0")

    assert meter.ready(5.0)
    now = time.monotonic()
    assert meter.between(now - 60, now) == pytest.approx(JOULES)
    os.close(writing)


def test_a_refused_password_is_told_at_once():
    reading, writing = os.pipe()
    meter = Powermetrics(reading)
    os.close(writing)

    assert not meter.ready(5.0)


class Talker:
    """A pipeline and a contender in one: 10 tokens in a twentieth of a second."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __enter__(self) -> "Talker":
        return self

    def __exit__(self, *_: object) -> None: ...

    def generate(self, task: object) -> SimpleNamespace:
        time.sleep(0.05)
        return SimpleNamespace(tokens=range(10))


@pytest.mark.thorough
def test_joules_a_token_are_what_the_meter_says_while_tokens_were_generated(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(energy, "Pipeline", Talker)
    monkeypatch.setattr(energy, "PipelineContender", Talker)
    monkeypatch.setattr(energy, "SETTLING_SECONDS", 0.2)
    reading, writing = os.pipe()
    ended = threading.Event()

    def ten_watts() -> None:
        last = time.monotonic()
        while not ended.wait(0.05):
            passed, last = time.monotonic() - last, time.monotonic()
            processor = {"cpu_power": 2000.0, "gpu_power": 8000.0}
            one = {"elapsed_ns": int(1e9 * passed), "processor": processor}
            os.write(writing, plistlib.dumps(one) + b"\0")

    thread = threading.Thread(target=ten_watts)
    thread.start()
    try:
        found = energy.measure(Asked(LightSettings(short=True), lambda _: None, power=reading))
    finally:
        ended.set()
        thread.join()
        os.close(writing)
    idle = {value.name: value.value for value in found.values}
    plain, adaptive = found.tables[0].rows

    assert (plain[0], adaptive[0]) == ("ar", "adaptive")
    # The ends of a stretch lie inside of samples that came a little late.
    assert idle["idle, gpu"] == pytest.approx(8.0, rel=0.3)
    _, tokens, speed, joules, _, parts = plain
    assert isinstance(tokens, int)
    assert isinstance(speed, float)
    assert tokens >= 10
    assert joules == pytest.approx(10.0 / speed, rel=0.3)
    assert str(parts).startswith("cpu ")


def test_without_powermetrics_on_a_mac_the_reason_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.platform", "darwin")

    with pytest.raises(PipelineError, match="at a terminal"):
        energy.measure(Asked(LightSettings(short=True, energy=True), lambda _: None))
