"""Laws of what is measured around decoding: sleep is seen by two clocks, and a hop goes there and back."""

from itertools import cycle
from types import SimpleNamespace

import pytest

from orchestrator.lab.first_light import circumstances, hops
from orchestrator.lab.first_light.circumstances import asleep
from orchestrator.lab.first_light.stages import Asked, LightSettings
from orchestrator.machine.default_target import VARIABLE
from protocol.errors import PipelineError
from protocol.processes import QualityOfService

ASKED = Asked(LightSettings(short=True), lambda _: None)


class Clocks:
    """Each pause is a second of both clocks; after `until` of them the machine sleeps for `slept` seconds."""

    def __init__(self, until: int, slept: float) -> None:
        self.steady, self.ahead, self.until, self.slept = 100.0, 5000.0, until, slept

    def pause(self, seconds: float) -> None:
        self.steady += seconds
        self.until -= 1
        self.ahead += self.slept if self.until == 0 else 0.0

    def asleep(self, patience: float) -> float | None:
        return asleep(patience, lambda: self.steady + self.ahead, lambda: self.steady, self.pause)


@pytest.mark.parametrize(("until", "slept", "found"), [(3, 31.0, 31.0), (3, 2.0, None), (500, 31.0, None)])
def test_a_machine_has_slept_where_the_wall_clock_is_ahead(until: int, slept: float, found: float | None):
    assert Clocks(until, slept).asleep(60.0) == found


class FakePipeline:
    """Its workers are lost in sleep, and the first request after it is slow."""

    def __init__(self, **_: object) -> None:
        self.rates = cycle((50.0, 60.0, 60.0, 20.0, 55.0, 57.0))

    def __enter__(self) -> "FakePipeline":
        return self

    def __exit__(self, *_: object) -> None: ...

    def state(self) -> SimpleNamespace:
        return SimpleNamespace(lost=1)

    def generate(self, *_: object) -> SimpleNamespace:
        return SimpleNamespace(statistics=SimpleNamespace(tokens_per_second=next(self.rates)))


@pytest.mark.parametrize("slept", [31.0, 0.0])
def test_what_comes_after_sleep_is_told_and_a_machine_that_stays_awake_is_no_answer(
    slept: float, monkeypatch: pytest.MonkeyPatch
):
    heard: list[str] = []
    monkeypatch.setenv(VARIABLE, "demo")
    monkeypatch.setattr(circumstances, "Pipeline", FakePipeline)
    monkeypatch.setattr(circumstances, "asleep", Clocks(2, slept).asleep)
    asked = ASKED._replace(notice=heard.append)
    if not slept:
        with pytest.raises(PipelineError, match="start the stage again, and close the lid"):
            circumstances.sleep(asked)
        return
    (answer,) = circumstances.sleep(asked).answers

    assert answer.text == (
        "After 31 s of sleep 1 workers were lost; tokens/s: 60.0 before, 20.0 in the first request, 56.0 later."
    )
    assert "put this machine to sleep now" in heard[0]


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (("false",), "ended unexpectedly"),
        (("printf", '{"type":"failed","text":"It has windows.","input_error":true}\\n'), "It has windows"),
    ],
)
def test_a_conversion_that_fails_beside_decoding_is_told(program: tuple[str, ...], reason: str, monkeypatch):
    monkeypatch.setenv(VARIABLE, "demo")
    monkeypatch.setattr(circumstances, "Pipeline", FakePipeline)
    monkeypatch.setattr(circumstances, "_NICE", program)
    monkeypatch.setattr(circumstances, "module_command", lambda _: ())
    monkeypatch.setattr(circumstances, "ConversionOrder", lambda **_: None)
    with pytest.raises(PipelineError, match=reason):
        circumstances.conversion(ASKED)


@pytest.mark.parametrize("quality", [None, QualityOfService.USER_INTERACTIVE])
def test_a_hop_goes_to_another_process_and_back(quality: QualityOfService | None):
    taken = hops.hops(quality, 0.0, 5)

    assert len(taken) == 5
    assert all(0.0 < seconds < 10.0 for seconds in taken)


def test_another_process_that_does_not_answer_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hops, "module_command", lambda _: ("false",))
    monkeypatch.setattr(hops, "_SILENCE", 200)
    with pytest.raises(PipelineError, match="did not answer"):
        hops.hops(None, 0.0, 1)
