"""Laws of watching: it changes nothing, tells what happened once, is bounded, and costs nobody a round."""

import itertools

import msgspec
import pytest

from orchestrator.core.commands import Command
from orchestrator.core.events import Arrived, Event
from orchestrator.core.options import Options
from orchestrator.core.policy.strategies import STRATEGIES
from orchestrator.core.telemetry.recorder import TelemetryRecorder
from orchestrator.core.telemetry.watchers import MOST_WATCHERS, PAUSE, Watchers
from protocol.messages.base import SequenceId
from protocol.messages.telemetry import (
    MOST_JUDGED,
    MOST_NODES,
    MOST_SPANS,
    FromClientOrWatcher,
    TelemetryFrame,
    ToClientOrWatcher,
    Watch,
)
from protocol.messages.worker import Prefilled
from protocol.transport.codec import Stamp, decode, encode
from tests.support.scripted_simulation import ONE, TARGET, ScriptedSimulation, ready


class WatchedSimulation(ScriptedSimulation):
    """A target and a draft, seen by whoever asks."""

    def __init__(self, **options) -> None:
        super().__init__(Options(**options))
        self.recorder = TelemetryRecorder(self.machine, lambda token: f"<{token}>")
        self.start("target")
        self.start("draft")

    def step(self, event: Event) -> list[Command]:
        commands = super().step(event)
        self.recorder.saw(event, commands, self.now)
        return commands

    def scene(self, after: int = 0, wanted: int | None = None) -> TelemetryFrame:
        return self.recorder.scene(after, None if wanted is None else SequenceId(wanted), self.now)


def watched(events: int = 2000, *requests: int, **options) -> WatchedSimulation:
    simulation = WatchedSimulation(**options)
    for number in requests or (1,):
        simulation.submit(number, max_tokens=120)
    simulation.run_events(events)
    return simulation


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_who_watches_changes_nothing(strategy):
    seen, unseen = WatchedSimulation(strategy=strategy), ready(strategy)
    for simulation in (seen, unseen):
        simulation.submit(1, max_tokens=40)
        for _ in range(60):
            simulation.run_events(3)
            if simulation is seen:
                seen.scene()

    assert seen.history == unseen.history
    assert seen.clients[ONE].tokens == seen.clients[ONE].reference


def test_the_rounds_that_are_told_give_the_text():
    simulation, after, told = WatchedSimulation(), 0, []
    client = simulation.clients[simulation.submit(1, max_tokens=40)]
    while after == 0 or ONE in simulation.live:
        simulation.run_events(2)
        scene = simulation.scene(after)
        after = scene.serial
        assert scene.lost == 0
        for judged in scene.judged:
            accepted = [judged.sent.texts[index] for index in judged.accepted]
            told += [*accepted, judged.bonus][: judged.tokens]

    assert told == [f"<{token}>" for token in client.reference]


def test_an_accepted_path_runs_down_the_tree_that_was_sent():
    for judged in watched().scene().judged:
        parent = 0
        for index in judged.accepted:
            assert judged.sent.parents[index] == parent
            parent = index


def test_what_is_under_verification_is_part_of_the_tree():
    simulation = watched(events=40)
    sequence = simulation.machine.sequences[ONE]
    simulation.run_while(lambda: sequence.outstanding is None or len(sequence.outstanding.tokens) < 3)
    shown, outstanding = simulation.scene().shown, sequence.outstanding
    assert shown is not None
    assert outstanding is not None

    assert [shown.tree.texts[index] for index in shown.asked] == [f"<{token}>" for token in outstanding.tokens]
    assert shown.tree.texts[0] == shown.tail[-1]


def test_a_tree_is_told_parents_first_with_falling_probabilities():
    for events in range(5, 60, 5):
        shown = watched(events).scene().shown
        assert shown is not None
        tree = shown.tree
        assert tree.parents[0] == -1
        assert len(set(tree.keys)) == len(tree.keys)
        for index, parent in enumerate(tree.parents[1:], start=1):
            assert 0 <= parent < index
            assert tree.paths[index] <= tree.paths[parent] + 1e-9


def test_spans_last_as_long_as_their_work_and_lie_in_the_past():
    simulation = watched()
    for span in simulation.scene().spans:
        assert span.begin <= span.end <= simulation.now
    verified = [span for span in simulation.scene().spans if span.kind == "verify"]

    assert all(span.end - span.begin == pytest.approx(TARGET.forward(span.tokens)) for span in verified)
    assert {span.role for span in simulation.scene().spans} == {"draft", "target"}


def test_figures_are_those_of_the_statistics():
    simulation = watched(events=60)
    shown = simulation.scene().shown
    assert shown is not None
    simulation.cancel(ONE)
    figures = simulation.statistics()

    assert shown.hits / shown.chances == figures.hit_rate
    assert sum(shown.accepted) / sum(shown.tried) == figures.acceptance_rate
    assert shown.generated / shown.rounds == figures.tokens_per_round
    assert shown.generated / shown.decoding == pytest.approx(figures.tokens_per_second)
    assert shown.plain == pytest.approx(0.011, rel=0.2)


def test_a_request_that_is_over_is_told_with_its_statistics():
    simulation = watched()
    (over,) = simulation.scene().over

    assert over.sequence == 1
    assert over.statistics == simulation.statistics()
    assert simulation.scene(after=simulation.recorder.serial).over == ()


def test_plain_decoding_is_estimated_only_once_something_was_measured():
    simulation = WatchedSimulation()
    simulation.submit(1, max_tokens=5)
    shown = simulation.scene().shown
    assert shown is not None

    assert shown.plain is None


def test_the_latest_request_is_shown_unless_another_one_is_wanted():
    simulation = watched(12, 1, 2, 3)
    shown = [simulation.scene(wanted=wanted).shown for wanted in (None, 1, 2, 99)]

    assert [one.sequence for one in shown if one] == [3, 1, 2, 3]
    assert [one.sequence for one in simulation.scene().requests] == [1, 2, 3]


def test_rounds_of_several_requests_are_all_told():
    simulation = watched(60, 1, 2, 3)

    assert {judged.sequence for judged in simulation.scene().judged} == {1, 2, 3}


def test_scenes_are_bounded_however_much_happened():
    simulation = watched(4000, *range(1, 40))
    scene = simulation.scene()

    assert len(scene.judged) <= MOST_JUDGED
    assert len(scene.spans) <= MOST_SPANS
    assert scene.lost > 0
    assert all(len(judged.sent.texts) <= MOST_NODES for judged in scene.judged)
    assert len(encode(scene, Stamp(0, 0))) < 1 << 17


def test_questions_and_scenes_survive_the_wire():
    stamp = Stamp(0, 0)
    for scene in (watched(events).scene() for events in (0, 3, 30, 4000)):
        assert msgspec.to_builtins(decode(encode(scene, stamp), ToClientOrWatcher)[1]) == msgspec.to_builtins(scene)
    assert decode(encode(Watch(3), stamp), FromClientOrWatcher)[1] == Watch(3)


def test_a_number_from_another_life_is_taken_for_none():
    simulation = watched(30)

    assert simulation.scene(after=10**9).judged == simulation.scene().judged


def test_a_worker_that_claims_a_year_is_shown_with_a_minute():
    simulation = WatchedSimulation()
    simulation.submit(1, max_tokens=5)
    simulation.clock.now = 100.0
    simulation.step(Arrived("target", simulation.own["target"], Prefilled(ONE, 0, 2, seconds=1e6)))

    assert simulation.scene().spans[-1].begin == pytest.approx(40.0)


# When watchers are told --------------------------------------------------------------------------


def test_nothing_is_watched_before_somebody_asks_and_after_the_last_one_has_gone():
    simulation = WatchedSimulation()
    watchers = Watchers[str](simulation.recorder)
    assert not watchers.watching
    assert watchers.deadline() is None

    watchers.ask("a", Watch(simulation.recorder.serial), 0.0)
    assert watchers.watching
    told = []
    for _ in range(10):
        deadline = watchers.deadline()
        if deadline is None:
            break
        told += watchers.due(deadline)

    assert not watchers.watching
    assert len(told) == 1


def test_no_more_than_twenty_scenes_a_second_however_often_they_are_asked_for():
    simulation = watched(30)
    watchers = Watchers[int](simulation.recorder)
    moments, now = [], 10.0
    for _ in range(2000):
        now += 0.001
        for who in range(4):
            watchers.ask(who, Watch(0), now)
        if watchers.due(now):
            moments.append(now)

    assert all(later - sooner >= PAUSE - 1e-9 for sooner, later in itertools.pairwise(moments))
    assert len(moments) == pytest.approx(40, abs=2)


def test_without_news_the_answer_waits_and_with_news_it_comes():
    simulation = watched(30)
    watchers = Watchers[str](simulation.recorder)
    watchers.ask("a", Watch(simulation.recorder.serial), 5.0)
    assert watchers.due(5.5) == []

    simulation.submit(2, max_tokens=5)
    ((who, scene),) = watchers.due(5.6)

    assert who == "a"
    assert scene.shown is not None
    assert scene.shown.sequence == 2


def test_each_question_is_answered_once_and_too_many_watchers_are_forgotten():
    watchers = Watchers[int](watched(30).recorder)
    for who in range(MOST_WATCHERS + 5):
        watchers.ask(who, Watch(0), 1.0)

    told = [who for who, _ in watchers.due(2.0)]
    assert told == list(range(5, MOST_WATCHERS + 5))
    assert watchers.due(2.5) == []
