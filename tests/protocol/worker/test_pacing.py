"""A paced worker takes the profile's time and gives its own tokens; overruns are counted."""

import tomllib
from importlib import resources
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft_worker.worker import DraftWorker
from orchestrator import Pipeline, SamplingParams
from orchestrator.core.options import Options, StrategyName
from orchestrator.core.request_stats import RequestStats
from orchestrator.machine.profiles.device_profiles import (
    DeviceProfile,
    load_profile,
    mac_names,
    parse_profile,
    worker_pace,
)
from protocol.errors import InputError
from protocol.messages.base import NodeId, RequestId, Role
from protocol.messages.plans import BestFirst
from protocol.messages.sampling import Sampling
from protocol.messages.worker import Grow, Hello, Paced, Start, Verdict, Verify
from protocol.worker import pacing
from protocol.worker.pacing import DevicePace, PacedPart, Pacer, sleep_precisely
from target_worker.engine import TargetEngine
from target_worker.worker import TargetWorker
from tests.conftest import Reference
from tests.support.fake_draft import FakeEngine
from tests.support.models.tiny_models import VOCABULARY, tree_model

_PACE = DevicePace(steps=((1, 0.020), (3, 0.024), (8, 0.036)), prefill_rate=1000.0)
_PROFILE = """
name = "mine"
description = ""
both_busy = { factor = 1.5, source = "s" }

[target]
prefill = { tokens_per_second = 2000, source = "s" }
steps = [{ width = 1, milliseconds = 8, source = "s" }, { width = 8, milliseconds = 9, source = "s" }]

[draft]
prefill = { tokens_per_second = 4000, source = "s" }
steps = [{ width = 1, milliseconds = 3, source = "s" }]

[draft_on_target_device]
prefill = { tokens_per_second = 4000, source = "s" }
steps = [{ width = 1, milliseconds = 2, source = "s" }]
"""


@pytest.mark.parametrize("seconds", [0.0004, 0.002, 0.0085, 0.05])
def test_a_sleep_ends_in_time_where_timers_are_late_as_on_a_mac(monkeypatch: pytest.MonkeyPatch, seconds: float):
    """By min(t / 8, 1 ms): XNU, osfmk/kern/timer_call.c, timer_call_slop."""
    time = _Time()
    sleeping = SimpleNamespace(perf_counter=time.tick, sleep=lambda slept: time.spend(slept + min(slept / 8, 1e-3)))
    monkeypatch.setattr(pacing, "time", sleeping)
    monkeypatch.setattr(pacing, "_SPIN_SECONDS", pacing.spin_seconds("darwin"))

    sleep_precisely(seconds)

    assert time.now - 100.0 == pytest.approx(seconds, abs=1e-5)


class _Time:
    """A clock that only `sleep` and `spend` advance."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        self.now += seconds

    def tick(self) -> float:
        """The time, which asking takes."""
        self.now += 1e-6
        return self.now


def _pacer(pace: DevicePace | None = _PACE) -> tuple[Pacer, _Time]:
    time = _Time()
    return Pacer(pace, time, time.spend), time


# The curve ----------------------------------------------------------------------------------------


_CURVES = {
    "lines between points and behind them": (_PACE, {1: 0.020, 2: 0.022, 3: 0.024, 8: 0.036, 10: 0.0408}),
    "steps down to the point before": (
        DevicePace(steps=((1, 0.02), (5, 0.03), (10, 0.05)), shape="steps", prefill_rate=1.0),
        {1: 0.02, 2: 0.03, 5: 0.03, 6: 0.05, 10: 0.05, 15: 0.07},
    ),
    "one point: width costs nothing": (DevicePace(steps=((1, 0.005),), prefill_rate=1.0), {1: 0.005, 64: 0.005}),
    "slowed down": (msgspec.structs.replace(_PACE, slow_down=1.25), {1: 0.025, 3: 0.030}),
}


@pytest.mark.parametrize(("pace", "seconds"), _CURVES.values(), ids=[*_CURVES])
def test_a_forward_takes_what_the_points_say(pace: DevicePace, seconds: dict[int, float]):
    assert {width: pace.forward(width) for width in seconds} == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("vector", "readings"), [(8, [1, 8, 16, 16, 16, 20]), (4, [1, 8, 16, 16, 16, 20]), (0, [1, 1, 1, 1, 2, 20])]
)
def test_a_context_costs_a_reading_of_its_kv_a_query_up_to_eight_and_sixteen_for_nine_on_metal(
    vector: int, readings: list[int]
):
    """mlx issue 3826. Elsewhere a reading for 32 queries."""
    long = msgspec.structs.replace(_PACE, context_seconds=1e-6, vector_queries=vector)

    extra = [long.forward(width, 10_000) - long.forward(width) for width in (1, 8, 9, 32, 33, 640)]
    assert extra == pytest.approx([0.01 * each for each in readings])
    assert long.prefill(512, 10_000) == pytest.approx(0.512 + 16 * 0.01)


def test_sequences_share_the_products_of_a_forward_but_not_the_attention():
    shared = msgspec.structs.replace(_PACE, context_seconds=1e-6, vector_queries=4, sequence_seconds=0.002)

    seconds = shared.joint([PacedPart(3, 1000), PacedPart(5, 2000)])

    assert seconds == pytest.approx(_PACE.forward(8) + 3 * 0.001 + 5 * 0.002 + 0.002)


def test_a_prefill_has_its_own_rate_but_no_chunk_is_faster_than_one_token():
    slow = msgspec.structs.replace(_PACE, slow_down=1.25)

    assert [_PACE.prefill(512), slow.prefill(512)] == pytest.approx([0.512, 0.64])
    assert _PACE.prefill(2) == _PACE.forward(1)


# The pacer ----------------------------------------------------------------------------------------


@given(tokens=st.integers(1, 64), worked=st.floats(0.0, 0.5))
def test_a_forward_never_ends_before_the_device_would_nor_before_its_real_work(tokens: int, worked: float):
    pacer, time = _pacer()
    began = time()
    time.spend(worked)

    pacer.forward(began, [PacedPart(tokens)])

    assert time() - began == pytest.approx(max(worked, _PACE.forward(tokens)), abs=1e-9)


@given(works=st.lists(st.sampled_from([0.001, 0.019, 0.021, 0.3]), max_size=20))
def test_a_forward_overruns_exactly_when_its_work_takes_longer(works: list[float]):
    pacer, time = _pacer()
    for worked in works:
        began = time()
        time.spend(worked)
        pacer.forward(began, [PacedPart(1)])

    paced = pacer.take()

    assert paced is not None
    assert (paced.forwards, paced.overruns) == (len(works), sum(worked > 0.020 for worked in works))
    assert paced.excess == pytest.approx(sum(max(0.0, worked - 0.020) for worked in works), abs=1e-9)


def test_a_late_wake_up_is_no_overrun_and_is_reported():
    time = _Time()
    pacer = Pacer(_PACE, time, lambda seconds: time.spend(seconds + 0.003))

    pacer.forward(time(), [PacedPart(1)])

    paced = pacer.take()
    assert paced is not None
    assert paced.overruns == 0
    assert paced.excess == pytest.approx(0.003)


def test_without_a_pace_there_is_no_sleep_and_no_report():
    pacer, time = _pacer(None)

    pacer.forward(time(), [PacedPart(8)])
    pacer.prefill(time(), PacedPart(8))

    assert time() == 100.0
    assert pacer.take() is None


# Workers ------------------------------------------------------------------------------------------


def test_a_paced_target_reports_the_device_s_seconds_and_its_own_tokens():
    pacer, time = _pacer()
    hello = Hello("target", "mlx", "tiny", "llama", VOCABULARY, 512, "none", "cpu", 1)
    plain = TargetWorker(TargetEngine(tree_model()), _Time(), hello)
    paced = TargetWorker(TargetEngine(tree_model()), time, hello, pacer)
    start = Start(RequestId(1), 0, (5, 9, 2), NodeId(7), Sampling())
    verify = Verify(RequestId(1), 0, NodeId(7), 2, (2, 4, 8), (-1, 0, 1))

    verdicts = []
    for worker in (plain, paced):
        (_,) = [*worker.handle(start), *worker.work()]
        verdicts += [reply for reply in worker.handle(verify) if isinstance(reply, Verdict)]

    ours, theirs = verdicts
    assert (ours.path, ours.bonus, ours.paced) == (theirs.path, theirs.bonus, None)
    assert theirs.seconds == pytest.approx(_PACE.forward(3))
    assert theirs.paced is not None
    assert (theirs.paced.forwards, theirs.paced.overruns) == (1, 0)


def test_the_hello_of_a_paced_worker_states_the_device_s_costs_and_not_this_machine_s():
    pacer, time = _pacer()
    measured = Hello("target", "mlx", "tiny", "llama", VOCABULARY, 512, "none", "cpu", 1, costs=((1, 7.0),))
    target = TargetWorker(TargetEngine(tree_model()), time, measured, pacer)
    draft = DraftWorker(FakeEngine(), time, pacer=pacer)

    for worker in (target, draft):
        costs = worker.hello().costs
        assert [width for width, _ in costs] == list(range(1, 18))
        assert [seconds for _, seconds in costs] == pytest.approx([_PACE.forward(width) for width, _ in costs])
    assert TargetWorker(TargetEngine(tree_model()), time, measured).hello().costs == ((1, 7.0),)


def test_a_paced_draft_reports_the_device_s_seconds_for_all_it_evaluated():
    pacer, time = _pacer()
    worker = DraftWorker(FakeEngine(), time, pacer=pacer)
    list(worker.handle(Start(RequestId(1), 0, (1, 2, 3), NodeId(7), Sampling(), BestFirst(width=4, fan=2))))

    grown = [grow for _ in range(4) for grow in worker.work() if isinstance(grow, Grow)]

    assert [grow.seconds for grow in grown] == pytest.approx([_PACE.forward(grow.evaluated) for grow in grown])
    assert [grow.paced and grow.paced.forwards for grow in grown] == [1, 1, 1, 1]


# A request's figures ------------------------------------------------------------------------------


@pytest.mark.parametrize(("overruns", "valid"), [(0, True), (2, True), (3, False)])
def test_a_run_with_more_than_one_overrun_in_a_hundred_is_invalid(overruns: int, valid: bool):
    stats = RequestStats(0.0, 5)
    stats.add_paced(Paced(forwards=150, overruns=overruns, seconds=10.0, excess=0.1))
    stats.add_paced(Paced(forwards=50, seconds=10.0, excess=0.1))
    stats.add_paced(None)

    pace = stats.statistics(1.0, True, True, "m4").pace

    assert pace is not None
    assert (pace.profile, pace.forwards, pace.overruns, pace.valid) == ("m4", 200, overruns, valid)
    assert pace.stretch == pytest.approx(0.01)


# Profiles -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", mac_names())
def test_a_mac_s_profile_has_the_quoted_speed_of_plain_decoding(name: str):
    facts = tomllib.loads((resources.files("orchestrator.machine.profiles") / "apple_silicon.toml").read_text())
    plain = facts["machines"][name]["plain"]
    context = plain.get("context", 0)
    profile = load_profile(name)
    target = profile.target.pace()

    assert 1 / target.forward(1, context) == pytest.approx(plain["tokens_per_second"], rel=0.005)
    assert target.forward(1, context + 1000) > target.forward(1, context)
    assert target.joint([PacedPart(1)] * 2) > target.forward(2)
    described = (profile.target, profile.draft, profile.draft_on_target_device)
    sources = [step.source for times in described for step in times.steps]
    assert all(source.startswith(("measured", "claimed", "assumed", "derived", "by the")) for source in sources)


def test_the_kernels_of_the_macs_have_the_measured_costs():
    """M3 Max, 5120 x 17408 (mlx PR 3863); M5 Max, a whole model of 70B (mlx PR 3791), in milliseconds."""
    m3 = load_profile("m3-max-llama3.1-8b").target
    # 8.03 billion weights of 4.5 bits, read at 400 GB/s.
    products = 8.03e9 * 4.5 / 8 / 400e6
    beside = m3.pace().forward(1) * 1000 - products
    ratios = [(1000 * m3.pace().forward(width) - beside) / products for width in (1, 2, 4, 6, 8, 9, 13, 32)]
    m5 = load_profile("m5-max-llama3.3-70b").target.pace()

    assert ratios == pytest.approx([1.0, 1.0, 1.28, 2.04, 2.50, 3.14, 3.94, 3.98], rel=0.02)
    assert [1000 * m5.forward(width, 400) for width in (1, 3, 5, 8, 12)] == pytest.approx(
        [75.9, 84.8, 112.7, 170.8, 241.5], rel=0.12
    )


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("milliseconds = 8,", "milliseconds = 0,", "target.steps"),
        ("milliseconds = 8,", "milliseconds = nan,", "target.steps"),
        ("milliseconds = 8,", "milliseconds = inf,", "target.steps"),
        ("milliseconds = 8, source", "milliseconds = 8, sauce", "source|sauce"),
        ('8, source = "s"', '8, source = ""', "source"),
        ("width = 8", "width = 1", "rise"),
        ("{ width = 1, milliseconds = 3", "{ width = 2, milliseconds = 3", "draft.steps"),
        ("factor = 1.5", "factor = 0.5", "factor"),
        ("[draft]", "[drift]", "drift|draft"),
        ('name = "mine"', "name = mine", "TOML|line"),
        ("tokens_per_second = 2000", "tokens_per_second = -1", "tokens_per_second"),
    ],
)
def test_an_inconsistent_profile_is_refused_with_the_reason(before: str, after: str, said: str):
    assert before in _PROFILE

    with pytest.raises(InputError, match=rf"^Profile mine\.toml can't be used: .*({said}).*\. See .*\.$"):
        parse_profile(_PROFILE.replace(before, after), "mine.toml")


def test_an_unknown_profile_is_refused_with_the_names_there_are():
    with pytest.raises(InputError, match=r"m4-16gb-qwen2\.5-3b"):
        Pipeline(pace="m9-ultra")


def _mine() -> DeviceProfile:
    return parse_profile(_PROFILE, "mine.toml")


@pytest.mark.parametrize(("strategy", "slow_down"), [("ar", 1.0), ("sd", 1.0), ("ssd", 1.5), ("adaptive", 1.5)])
def test_devices_slow_each_other_down_only_where_both_work_at_once(strategy: StrategyName, slow_down: float):
    roles: tuple[Role, ...] = ("draft", "target")
    for role in roles:
        pace = worker_pace(_mine(), role, Options(strategy=strategy), "mlx")
        assert pace is not None
        assert pace.slow_down == slow_down


def test_prompt_lookup_needs_no_device_and_slows_none():
    target = worker_pace(_mine(), "target", Options(), "ngram")

    assert worker_pace(_mine(), "draft", Options(), "ngram") is None
    assert target is not None
    assert target.slow_down == 1.0


def test_a_draft_on_the_target_s_device_has_that_device_s_times_and_slows_nobody_down():
    profile, options = _mine(), Options(placement="shared")

    assert worker_pace(profile, "draft", options, "mlx") == profile.draft_on_target_device.pace()
    assert worker_pace(profile, "target", options, "mlx") == profile.target.pace()


# The whole ----------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_paced_run_gives_the_same_tokens_in_at_least_the_profile_s_time(
    reference: Reference, tmp_path: Path, temperature: float
):
    path = tmp_path / "mine.toml"
    path.write_text(_PROFILE)
    params = SamplingParams(temperature=temperature, seed=4, max_tokens=24)
    prompt = "def mean(values):\n"

    with Pipeline(pace=str(path)) as pipeline:
        result = pipeline.generate(prompt, params)

    assert result.tokens == reference(prompt, params).tokens
    figures = result.statistics
    assert figures.pace is not None
    assert figures.pace.profile == "mine"
    assert figures.pace.forwards > figures.rounds
    assert figures.generated_tokens / figures.tokens_per_second >= figures.rounds * 0.008 * 1.5
