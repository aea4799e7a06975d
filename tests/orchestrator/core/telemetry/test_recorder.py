"""Laws of watching: it changes nothing, tells what happened once, is bounded, and costs nobody a round."""

import itertools

import msgspec
import pytest

from orchestrator.core.commands import Command
from orchestrator.core.events import Arrived, Ended, Event
from orchestrator.core.options import Options
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
from protocol.transport.codec import Stamp, decode, encode
from tests.orchestrator.core.test_machine import PROMPT, Bench
from tests.support.simulated_workers import reference


class Watched(Bench):
    """The same bench, seen by whoever asks."""

    def __init__(self, options: Options | None = None) -> None:
        super().__init__(options)
        self.observation = TelemetryRecorder(self.machine, lambda token: f"<{token}>")
        self.up("target")
        self.up("draft")

    def step(self, event: Event) -> list[Command]:
        commands = super().step(event)
        self.observation.saw(event, commands, self.now)
        return commands

    def scene(self, after: int = 0, wanted: int | None = None) -> TelemetryFrame:
        return self.observation.scene(after, None if wanted is None else SequenceId(wanted), self.now)


def watched(turns: int = 2000, *requests: int, **options) -> Watched:
    bench = Watched(Options(**options))
    for id in requests or (1,):
        bench.submit(id, max_tokens=120)
    bench.run(turns)
    return bench


@pytest.mark.parametrize("strategy", ["ar", "sd", "ssd", "adaptive"])
def test_who_watches_changes_nothing(strategy):
    seen, unseen = Watched(Options(strategy=strategy)), Bench(Options(strategy=strategy))
    unseen.up("target")
    unseen.up("draft")
    for bench in (seen, unseen):
        bench.submit(max_tokens=40)
        for _ in range(60):
            bench.run(3)
            if bench is seen:
                seen.scene()

    assert seen.steps == unseen.steps
    assert seen.tokens[1] == reference(PROMPT, 40, seed=1)


def test_the_rounds_that_are_told_give_the_text():
    bench, after, told = Watched(), 0, []
    bench.submit(max_tokens=40)
    for _ in range(200):
        bench.run(2)
        scene = bench.scene(after)
        after = scene.serial
        assert scene.lost == 0
        for judged in scene.judged:
            accepted = [judged.sent.texts[index] for index in judged.accepted]
            told += [*accepted, judged.bonus][: judged.tokens]

    assert told == [f"<{token}>" for token in reference(PROMPT, 40, seed=1)]


def test_an_accepted_path_runs_down_the_tree_that_was_sent():
    for judged in watched().scene().judged:
        parent = 0
        for index in judged.accepted:
            assert judged.sent.parents[index] == parent
            parent = index


def test_what_is_under_verification_is_part_of_the_tree():
    bench = watched(turns=40)
    shown = bench.scene().shown
    outstanding = bench.machine.sequences[SequenceId(1)].outstanding
    assert shown is not None
    assert outstanding is not None

    assert [shown.tree.texts[index] for index in shown.asked] == [f"<{token}>" for token in outstanding.tokens]
    assert shown.tree.texts[0] == shown.tail[-1]


def test_a_tree_is_told_parents_first_with_falling_probabilities():
    for turns in range(5, 60, 5):
        shown = watched(turns).scene().shown
        assert shown is not None
        tree = shown.tree
        assert tree.parents[0] == -1
        assert len(set(tree.keys)) == len(tree.keys)
        for index, parent in enumerate(tree.parents[1:], start=1):
            assert 0 <= parent < index
            assert tree.paths[index] <= tree.paths[parent] + 1e-9


def test_spans_last_as_long_as_their_work_and_lie_in_the_past():
    bench = watched()
    for span in bench.scene().spans:
        assert span.begin <= span.end <= bench.now
    verified = [span for span in bench.scene().spans if span.kind == "verify"]

    assert all(span.end - span.begin == pytest.approx(0.01 + 0.001 * span.tokens) for span in verified)
    assert {span.role for span in bench.scene().spans} == {"draft", "target"}


def test_figures_are_those_of_the_statistics():
    bench = watched(turns=60)
    shown = bench.scene().shown
    assert shown is not None
    bench.step(Ended(SequenceId(1), "cancelled"))
    figures = bench.finished[1].statistics

    assert shown.hits / shown.chances == figures.hit_rate
    assert sum(shown.accepted) / sum(shown.tried) == figures.acceptance_rate
    assert shown.generated / shown.rounds == figures.tokens_per_round
    assert shown.generated / shown.decoding == pytest.approx(figures.tokens_per_second)
    assert shown.plain == pytest.approx(0.011, rel=0.2)


def test_a_request_that_is_over_is_told_with_its_statistics():
    bench = watched()
    (over,) = bench.scene().over

    assert over.sequence == 1
    assert over.statistics == bench.finished[1].statistics
    assert bench.scene(after=bench.observation.serial).over == ()


def test_plain_decoding_is_estimated_only_once_something_was_measured():
    bench = Watched()
    bench.submit()
    shown = bench.scene().shown
    assert shown is not None

    assert shown.plain is None


def test_the_latest_request_is_shown_unless_another_one_is_wanted():
    bench = watched(12, 1, 2, 3)
    shown = [bench.scene(wanted=wanted).shown for wanted in (None, 1, 2, 99)]

    assert [one.sequence for one in shown if one] == [3, 1, 2, 3]
    assert [one.sequence for one in bench.scene().requests] == [1, 2, 3]


def test_rounds_of_several_requests_are_all_told():
    bench = watched(60, 1, 2, 3)

    assert {judged.sequence for judged in bench.scene().judged} == {1, 2, 3}


def test_scenes_are_bounded_however_much_happened():
    bench = watched(4000, *range(1, 40))
    scene = bench.scene()

    assert len(scene.judged) <= MOST_JUDGED
    assert len(scene.spans) <= MOST_SPANS
    assert scene.lost > 0
    assert all(len(judged.sent.texts) <= MOST_NODES for judged in scene.judged)
    assert len(encode(scene, Stamp(0, 0))) < 1 << 17


def test_questions_and_scenes_survive_the_wire():
    stamp = Stamp(0, 0)
    for scene in (watched(turns).scene() for turns in (0, 3, 30, 4000)):
        assert msgspec.to_builtins(decode(encode(scene, stamp), ToClientOrWatcher)[1]) == msgspec.to_builtins(scene)
    assert decode(encode(Watch(3), stamp), FromClientOrWatcher)[1] == Watch(3)


def test_a_number_from_another_life_is_taken_for_none():
    bench = watched(30)

    assert bench.scene(after=10**9).judged == bench.scene().judged


def test_a_worker_that_claims_a_year_is_shown_with_a_minute():
    bench = Watched()
    bench.submit()
    (_, _, role, incarnation, prefilled) = bench.queue.pop(0)
    bench.queue.clear()
    bench.now = 100.0
    bench.step(Arrived(role, incarnation, msgspec.structs.replace(prefilled, seconds=1e6)))

    assert bench.scene().spans[-1].begin == pytest.approx(40.0)


# When watchers are told --------------------------------------------------------------------------


def test_nothing_is_watched_before_somebody_asks_and_after_the_last_one_has_gone():
    bench = Watched()
    watchers = Watchers[str](bench.observation)
    assert not watchers.watching
    assert watchers.deadline() is None

    watchers.ask("a", Watch(bench.observation.serial), 0.0)
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
    bench = watched(30)
    watchers = Watchers[int](bench.observation)
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
    bench = watched(30)
    watchers = Watchers[str](bench.observation)
    watchers.ask("a", Watch(bench.observation.serial), 5.0)
    assert watchers.due(5.5) == []

    bench.submit(2)
    ((who, scene),) = watchers.due(5.6)

    assert who == "a"
    assert scene.shown is not None
    assert scene.shown.sequence == 2


def test_each_question_is_answered_once_and_too_many_watchers_are_forgotten():
    watchers = Watchers[int](watched(30).observation)
    for who in range(MOST_WATCHERS + 5):
        watchers.ask(who, Watch(0), 1.0)

    told = [who for who, _ in watchers.due(2.0)]
    assert told == list(range(5, MOST_WATCHERS + 5))
    assert watchers.due(2.5) == []
