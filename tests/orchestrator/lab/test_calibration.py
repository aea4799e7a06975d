"""A calibration asks what workers can answer, for as long as it likes, and writes a profile that can be read back."""

from collections import deque
from contextlib import nullcontext
from pathlib import Path
from time import perf_counter

import msgspec
import pytest
from click.testing import CliRunner

from draft_worker.worker import DraftWorker
from orchestrator.cli.app import cli
from orchestrator.cli.commands.measurements import calibrate as command
from orchestrator.lab import calibration
from orchestrator.lab.calibration import WIDTHS, Times, device_times, device_widths, slow_down_of, to_toml
from orchestrator.lab.worker_harness import PROMPT_TOKENS, GrowthLoad, RandomSequences, VerifyLoad
from orchestrator.machine.profiles.device_profiles import DeviceProfile, load_profile, parse_profile
from protocol.errors import InputError
from protocol.messages.base import Role
from protocol.messages.worker import FromWorker, Grow, Hello, Prefilled, Start, ToWorker, Verdict
from target_worker.engine import TargetEngine
from target_worker.worker import TargetWorker
from tests.support.fake_draft import VOCABULARY as DRAFT_VOCABULARY
from tests.support.fake_draft import FakeEngine
from tests.support.models.tiny_models import VOCABULARY, tree_model


def _hello(vocabulary: int) -> Hello:
    return Hello("target", "mlx", "tiny", "llama", vocabulary, 512, "none", "cpu", 1)


def test_a_target_answers_every_width_round_after_round():
    hello = _hello(VOCABULARY)
    worker = TargetWorker(TargetEngine(tree_model()), lambda: 0.0, hello)
    verifying = VerifyLoad(RandomSequences(hello))
    (read,) = [*worker.handle(verifying.start), *worker.work()]
    assert isinstance(read, Prefilled)

    for width in [*WIDTHS, *WIDTHS]:
        asked = verifying.ask(width)
        (verdict,) = worker.handle(asked)
        assert isinstance(verdict, Verdict)
        assert len(asked.tokens) == width
        verifying.heard(verdict)

    fresh = VerifyLoad(RandomSequences(hello))
    assert [fresh.has_room(512 - PROMPT_TOKENS + more) for more in (0, 1)] == [True, False]


@pytest.mark.parametrize("width", WIDTHS)
def test_a_draft_takes_steps_of_the_width_that_is_asked_for_and_never_rests(width: int):
    worker = DraftWorker(FakeEngine(), lambda: 0.0)
    growing = GrowthLoad(RandomSequences(_hello(DRAFT_VOCABULARY)), width)
    messages = growing.begin()
    full_steps = 0

    for _ in range(200):
        for message in messages:
            list(worker.handle(message))
        messages = []
        assert worker.has_work
        for grow in worker.work():
            assert isinstance(grow, Grow)
            full_steps += grow.evaluated == width
            messages = growing.begin() if growing.heard(grow.request, len(grow.tokens)) else []

    assert full_steps >= 20


def test_a_gpu_is_measured_at_every_width_at_which_its_kernels_may_change_and_a_plain_target_at_none():
    on_gpu = device_widths(msgspec.structs.replace(_hello(VOCABULARY), device="gpu (Apple M4)"))

    assert set(range(1, 18)) <= set(on_gpu)
    assert device_widths(_hello(VOCABULARY)) == WIDTHS
    with pytest.raises(InputError, match="one token a forward"):
        device_widths(msgspec.structs.replace(_hello(VOCABULARY), level="plain"))


class WorkersHere:
    """A `WorkerHarness` whose workers are in this process."""

    def __init__(self) -> None:
        self.prompts: list[int] = []
        """Tokens of every sequence that was started."""
        self._hellos = {"target": _hello(VOCABULARY), "draft": _hello(DRAFT_VOCABULARY)}
        target = TargetWorker(TargetEngine(tree_model()), perf_counter, self._hellos["target"])
        self._workers = {"target": target, "draft": DraftWorker(FakeEngine(), perf_counter)}
        self._said: deque[FromWorker] = deque()

    def start(self, role: Role) -> Hello:
        return self._hellos[role]

    def send(self, role: Role, message: ToWorker) -> None:
        if isinstance(message, Start):
            self.prompts.append(len(message.tokens))
        self._said += self._workers[role].handle(message)

    def receive(self) -> FromWorker:
        # Also if there is a message: neither worker waits for the other.
        while not self._work():
            pass
        return self._said.popleft()

    def _work(self) -> bool:
        """One unit of each; whether there is a message now."""
        for worker in self._workers.values():
            self._said += worker.work() if worker.has_work else ()
        return bool(self._said)

    def await_message(self, kind: type) -> FromWorker:
        return next(message for message in iter(self.receive, None) if isinstance(message, kind))


def test_steps_at_once_are_measured_without_long_prompts(monkeypatch: pytest.MonkeyPatch):
    workers = WorkersHere()
    monkeypatch.setattr(calibration, "_harness", lambda *_: nullcontext(workers))
    times = calibration.both_at_once(Path("t"), Path("d"), "mlx", samples=1, notice=lambda _: None)

    assert min(times) > 0.0
    assert set(workers.prompts) == {PROMPT_TOKENS}


def test_what_is_written_is_what_is_read():
    times = Times(prefill_rate=812.34, steps={1: 0.0213, 8: 0.036}, context_seconds=4.5e-7)
    profile = DeviceProfile(
        name="this-machine",
        description='An "M9"\\ with a tab\t and — dashes',
        target=device_times(times, "measured here"),
        draft=device_times(times, "measured here"),
        draft_on_target_device=device_times(times, "measured here"),
        both_busy=slow_down_of(1.12345, "measured here"),
    )

    read = parse_profile(to_toml(profile), "mine.toml")
    mac = load_profile("m3-pro-qwen3-4b")

    assert read == profile
    assert parse_profile(to_toml(mac), "mac.toml") == mac
    assert read.target.pace().context_seconds == pytest.approx(4.5e-7)
    assert read.both_busy.factor == 1.123
    assert read.target.pace().forward(8) == pytest.approx(0.036)


@pytest.mark.thorough
def test_this_machine_is_measured_and_the_profile_says_on_what_and_when(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(command, "SAMPLES", 1)
    path = tmp_path / "mine.toml"

    result = CliRunner().invoke(cli, ["calibrate", "--out", str(path)], catch_exceptions=False)

    assert result.exit_code == 0
    assert str(path) in result.stdout
    profile = load_profile(str(path))
    assert profile.target.context is not None
    for device in (profile.target, profile.draft, profile.draft_on_target_device):
        assert [step.width for step in device.steps] == list(WIDTHS)
        assert all(step.source.startswith("measured on ") and step.source[-10:-6].isdigit() for step in device.steps)


def test_a_file_that_can_not_be_written_is_refused_before_anything_is_measured(tmp_path: Path):
    (tmp_path / "file").write_text("")

    result = CliRunner().invoke(cli, ["calibrate", "--out", str(tmp_path / "file" / "mine.toml")])

    assert result.exit_code != 0
    assert "can't be written" in " ".join(f"{result.output} {result.exception}".split())
