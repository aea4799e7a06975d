"""Laws of telemetry: it changes nothing, reports each event once, is bounded, and is sent only on request."""

import itertools

import msgspec
import pytest

from orchestrator.core.commands import Command
from orchestrator.core.events import Event
from orchestrator.core.options import Options
from orchestrator.core.policy.strategies import STRATEGIES
from orchestrator.runtime.telemetry import FRAME_INTERVAL, MAX_SUBSCRIBERS, Subscribers, TelemetryRecorder
from protocol.messages.base import RequestId
from protocol.messages.telemetry import (
    MAX_NODES,
    MAX_ROUNDS,
    MAX_SPANS,
    TelemetryFrame,
    ToClientOrSubscriber,
    Watch,
)
from protocol.transport import Stamp, decode, encode
from tests.support.scripted_simulation import ONE, TARGET, ScriptedSimulation, ready

STAMP = Stamp(0, 0)


class WatchedSimulation(ScriptedSimulation):
    """A target and a draft whose events are recorded."""

    def __init__(self, **options) -> None:
        super().__init__(Options(**options))
        self.recorder = TelemetryRecorder(self.machine, lambda token: f"<{token}>")
        self.start("target")
        self.start("draft")

    def step(self, event: Event) -> list[Command]:
        commands = super().step(event)
        self.recorder.record(event, commands, self.now)
        return commands

    def frame(self, after: int = 0, wanted: int | None = None) -> TelemetryFrame:
        return self.recorder.frame(after, None if wanted is None else RequestId(wanted), self.now)


def watched(events: int = 2000, *requests: int, **options) -> WatchedSimulation:
    simulation = WatchedSimulation(**options)
    for number in requests or (1,):
        simulation.submit(number, max_tokens=120)
    simulation.run_events(events)
    return simulation


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_recording_changes_nothing(strategy):
    recorded, plain = WatchedSimulation(strategy=strategy), ready(strategy)
    for simulation in (recorded, plain):
        simulation.submit(1, max_tokens=40)
        for _ in range(60):
            simulation.run_events(3)
            if simulation is recorded:
                recorded.frame()

    assert recorded.history == plain.history
    assert recorded.clients[ONE].tokens == recorded.clients[ONE].reference


def test_verified_rounds_hold_all_committed_tokens():
    simulation, after, tokens = WatchedSimulation(), 0, []
    client = simulation.clients[simulation.submit(1, max_tokens=40)]
    while after == 0 or ONE in simulation.live:
        simulation.run_events(2)
        frame = simulation.frame(after)
        after = frame.serial
        assert frame.dropped == 0
        for verified in frame.verified:
            accepted = [verified.tree.texts[index] for index in verified.accepted]
            tokens += [*accepted, verified.bonus][: verified.committed]

    assert tokens == [f"<{token}>" for token in client.reference]


def test_nodes_under_verification_are_in_the_tree():
    simulation = watched(events=40)
    sequence = simulation.machine.requests[ONE]
    simulation.run_while(lambda: sequence.outstanding is None or len(sequence.outstanding.tokens) < 3)
    selected, outstanding = simulation.frame().selected, sequence.outstanding
    assert selected is not None
    assert outstanding is not None

    assert [selected.tree.texts[index] for index in selected.verifying] == [
        f"<{token}>" for token in outstanding.tokens
    ]
    assert selected.tree.texts[0] == selected.last_tokens[-1]


def test_a_tree_has_parents_before_children_and_falling_path_probabilities():
    for events in range(5, 60, 5):
        selected = watched(events).frame().selected
        assert selected is not None
        tree = selected.tree
        assert tree.parents[0] == -1
        assert len(set(tree.keys)) == len(tree.keys)
        for index, parent in enumerate(tree.parents[1:], start=1):
            assert 0 <= parent < index
            assert tree.path_probabilities[index] <= tree.path_probabilities[parent] + 1e-9


def test_a_span_lasts_as_long_as_its_work_and_lies_in_the_past():
    simulation = watched()
    for span in simulation.frame().spans:
        assert span.begin <= span.end <= simulation.now
    verified = [span for span in simulation.frame().spans if span.kind == "verify"]

    assert all(span.end - span.begin == pytest.approx(TARGET.forward(span.tokens)) for span in verified)
    assert {span.role for span in simulation.frame().spans} == {"draft", "target"}


def test_the_selected_requests_figures_equal_its_statistics():
    simulation = watched(events=60)
    selected = simulation.frame().selected
    assert selected is not None
    simulation.cancel(ONE)
    figures = simulation.statistics()

    assert selected.hits / selected.hit_chances == figures.hit_rate
    assert selected.overlapped_rounds == figures.overlapped_rounds
    assert sum(selected.accepted) / sum(selected.tried) == figures.acceptance_rate
    assert selected.generated_tokens / selected.rounds == figures.tokens_per_round
    assert selected.generated_tokens / selected.decode_seconds == pytest.approx(figures.tokens_per_second)
    assert selected.plain_tokens_per_second == pytest.approx(1 / 0.011, rel=0.2)
    assert figures.plain_tokens_per_second == selected.plain_tokens_per_second


def test_an_ended_request_is_reported_once_with_its_statistics():
    simulation = watched()
    (ended,) = simulation.frame().ended

    assert ended.request == 1
    assert ended.statistics == simulation.statistics()
    assert simulation.frame(after=simulation.recorder.serial).ended == ()


def test_plain_decoding_is_estimated_unless_it_is_plain_or_forwards_are_shared():
    """By what the target measured while it loaded, until its forwards tell more."""
    simulation = WatchedSimulation()
    simulation.submit(1, max_tokens=5)
    selected = simulation.frame().selected
    assert selected is not None

    assert selected.plain_tokens_per_second == pytest.approx(1 / 0.011)
    assert watched(strategy="ar").statistics().plain_tokens_per_second is None
    shared = watched(2000, 1, 2).frame().ended
    assert [ended.statistics.plain_tokens_per_second for ended in shared] == [None, None]


def test_the_latest_request_is_selected_unless_another_one_is_wanted_and_rounds_of_all_are_reported():
    simulation = watched(60, 1, 2, 3)
    selected = [simulation.frame(wanted=wanted).selected for wanted in (None, 1, 2, 99)]

    assert [one.request for one in selected if one] == [3, 1, 2, 3]
    assert [one.request for one in simulation.frame().requests] == [1, 2, 3]
    assert {verified.request for verified in simulation.frame().verified} == {1, 2, 3}


def test_a_frame_is_bounded_however_much_happened():
    simulation = watched(4000, *range(1, 40))
    frame = simulation.frame()

    assert len(frame.verified) <= MAX_ROUNDS
    assert len(frame.spans) <= MAX_SPANS
    assert frame.dropped > 0
    assert all(len(verified.tree.texts) <= MAX_NODES for verified in frame.verified)
    assert len(encode(frame, STAMP)) < 1 << 17
    for each in (frame, *(watched(events).frame() for events in (0, 3, 30))):
        assert msgspec.to_builtins(decode(encode(each, STAMP), ToClientOrSubscriber)[1]) == msgspec.to_builtins(each)


# When subscribers get a frame ---------------------------------------------------------------------


def test_nothing_is_recorded_without_a_subscriber():
    simulation = WatchedSimulation()
    subscribers = Subscribers[str](simulation.recorder)
    assert not subscribers.active
    assert subscribers.deadline() is None

    subscribers.ask("a", Watch(simulation.recorder.serial), 0.0)
    assert subscribers.active
    frames = []
    for _ in range(10):
        deadline = subscribers.deadline()
        if deadline is None:
            break
        frames += subscribers.due(deadline)

    assert not subscribers.active
    assert len(frames) == 1


def test_at_most_twenty_frames_a_second_are_built():
    simulation = watched(30)
    subscribers = Subscribers[int](simulation.recorder)
    moments, now = [], 10.0
    for _ in range(2000):
        now += 0.001
        for subscriber in range(4):
            subscribers.ask(subscriber, Watch(0), now)
        if subscribers.due(now):
            moments.append(now)

    assert all(later - sooner >= FRAME_INTERVAL - 1e-9 for sooner, later in itertools.pairwise(moments))
    assert len(moments) == pytest.approx(40, abs=2)


def test_a_frame_waits_until_something_happens():
    simulation = watched(30)
    subscribers = Subscribers[str](simulation.recorder)
    subscribers.ask("a", Watch(simulation.recorder.serial), 5.0)
    assert subscribers.due(5.5) == []

    simulation.submit(2, max_tokens=5)
    ((subscriber, frame),) = subscribers.due(5.6)

    assert subscriber == "a"
    assert frame.selected is not None
    assert frame.selected.request == 2


def test_each_watch_is_answered_once_and_the_oldest_of_too_many_are_dropped():
    subscribers = Subscribers[int](watched(30).recorder)
    for subscriber in range(MAX_SUBSCRIBERS + 5):
        subscribers.ask(subscriber, Watch(0), 1.0)

    answered = [subscriber for subscriber, _ in subscribers.due(2.0)]
    assert answered == list(range(5, MAX_SUBSCRIBERS + 5))
    assert subscribers.due(2.5) == []
