"""Laws of the target's features in the state machine: what is recorded, who gets it, and that no round notices."""

import pytest

from orchestrator.core.commands import Dismiss, SendMessage
from orchestrator.core.events import Arrived
from orchestrator.lab.simulate.worker_host import BuildWorker, SimulatedWorker
from orchestrator.lab.simulate.workers import ModelledDraft
from protocol.messages.base import Level, RequestId, Role
from protocol.messages.features import MAX_OUTPUTS, FeatureForm, Features, Tap, Taps
from protocol.messages.worker import Reroot, Start
from tests.support.recording_target import RING, TAPS, RecordingTarget, reading
from tests.support.scripted_simulation import CONTEXT, DRAFT, LANGUAGE, ONE, TARGET, ScriptedSimulation
from tests.support.simulation import WorkerHost

LOW, HIGH = FeatureForm((1, 4), 64), FeatureForm((-1, 4), 64)


def reader(form: FeatureForm | None) -> ModelledDraft:
    return reading(ModelledDraft(LANGUAGE, DRAFT, CONTEXT), form)


def building(form: FeatureForm | None = LOW, taps: Taps | None = TAPS, level: Level = "tree") -> BuildWorker:
    def build(role: Role) -> SimulatedWorker:
        return RecordingTarget(LANGUAGE, TARGET, CONTEXT, level, taps) if role == "target" else reader(form)

    return build


def pipeline(
    form: FeatureForm | None = LOW, order: tuple[Role, ...] = ("target", "draft"), **target
) -> ScriptedSimulation:
    simulation = ScriptedSimulation(build=building(form, **target))
    for role in order:
        simulation.start(role)
    return simulation


def taps(simulation: ScriptedSimulation) -> list[tuple[int, ...]]:
    return [tap.outputs for tap in simulation.sent(Tap)]


def relayed(simulation: ScriptedSimulation) -> list[Features]:
    return simulation.sent(Features)


def decoded(simulation: ScriptedSimulation, tokens: int = 40) -> None:
    sequence = simulation.submit(1, max_tokens=tokens)
    simulation.run()
    client = simulation.clients[sequence]
    assert client.tokens == client.reference


def relaying(tokens: int = 40, count: int = 1) -> ScriptedSimulation:
    """In the middle of a request of which so many features were relayed."""
    simulation = pipeline()
    simulation.submit(1, max_tokens=tokens)
    simulation.run_while(lambda: len(relayed(simulation)) < count)
    return simulation


def attach(simulation: ScriptedSimulation, form: FeatureForm | None) -> WorkerHost:
    return simulation.attach(reader(form))


def test_the_target_records_what_the_draft_reads_whichever_comes_first():
    assert taps(pipeline(order=("target", "draft"))) == [(1, 4)]
    assert taps(pipeline(order=("draft", "target"))) == [(1, 4)]


@pytest.mark.parametrize(("form", "level"), [(None, "tree"), (LOW, "plain")])
def test_nothing_is_recorded_for_drafts_that_read_tokens_alone_or_by_a_target_that_verifies_no_guesses(
    form: FeatureForm | None, level: Level
):
    simulation = pipeline(form=form, level=level)
    decoded(simulation)
    attach(simulation, form)

    assert taps(simulation) == []
    assert relayed(simulation) == []


def test_the_target_records_the_ascending_union_of_what_the_attached_drafts_read():
    simulation = pipeline()
    one, two = attach(simulation, HIGH), attach(simulation, LOW)
    simulation.remove(one.incarnation)
    simulation.kill("draft")
    earlier = taps(simulation)
    simulation.remove(two.incarnation)

    assert earlier == [(1, 4), (-1, 1, 4), (1, 4)]
    assert taps(simulation) == [*earlier, ()]


def test_a_draft_that_dies_in_mid_request_ends_no_ring():
    simulation = pipeline()
    sequence = simulation.submit(1, max_tokens=40)
    simulation.run_while(lambda: len(simulation.clients[sequence].tokens) < 5)
    simulation.kill("draft")
    simulation.start("draft")
    simulation.run()

    assert simulation.clients[sequence].tokens == simulation.clients[sequence].reference
    assert taps(simulation) == [(1, 4)]


def test_drafts_together_read_no_more_than_a_target_records():
    simulation = pipeline(FeatureForm((1,), 64), taps=Taps(80, 64))
    attach(simulation, FeatureForm(tuple(range(2, 2 + MAX_OUTPUTS - 1)), 64))
    attach(simulation, FeatureForm((40,), 64))

    assert taps(simulation) == [(1,), tuple(range(1, 1 + MAX_OUTPUTS))]


def test_a_new_target_records_before_it_is_sent_the_prompt():
    simulation = pipeline()
    simulation.submit(1, max_tokens=40)
    simulation.run_events(30)
    simulation.kill("target")
    earlier = len(simulation.commands)
    simulation.start("target")
    sent = [command.message for command in simulation.commands[earlier:] if isinstance(command, SendMessage)]

    assert [type(message) for message in sent] == [Tap, Start]


@pytest.mark.parametrize(
    ("form", "offered", "words"),
    [
        (FeatureForm((1,), 32), TAPS, "reads states of 32 numbers, and the target's have 64"),
        (FeatureForm((12,), 64), TAPS, "layer 12"),
        (LOW, None, "offers none"),
    ],
)
@pytest.mark.parametrize("order", [("target", "draft"), ("draft", "target")])
def test_a_draft_that_reads_what_the_target_does_not_record_is_dismissed_with_a_sentence(
    form: FeatureForm, offered: Taps | None, words: str, order: tuple[Role, ...]
):
    simulation = pipeline(form, order, taps=offered)
    (dismissed,) = [command for command in simulation.commands if isinstance(command, Dismiss)]

    assert words in dismissed.text
    assert taps(simulation) == []
    decoded(simulation)


def test_features_go_unchanged_to_the_drafts_in_use_that_read_them_and_to_no_other():
    simulation = pipeline()
    reads = attach(simulation, HIGH)
    standby = attach(simulation, LOW)
    simulation.submit(1, max_tokens=40)
    simulation.run()
    announced = [event.message for _, event, _ in simulation.history if isinstance(event, Arrived)]
    announced = [message for message in announced if isinstance(message, Features)]
    sent = simulation.sent(Features, simulation.own["draft"])

    assert len(sent) > 5
    assert sent == announced[: len(sent)]
    assert simulation.sent(Features, reads.incarnation) == sent
    assert simulation.sent(Features, standby.incarnation) == []


def test_the_draft_hears_the_reroot_first_and_features_end_before_its_root():
    simulation = pipeline()
    decoded(simulation)
    heard = [command.message for command in simulation.commands if isinstance(command, SendMessage)]
    roots = {message.round: message.position + len(message.tokens) for message in heard if isinstance(message, Reroot)}
    ends = [message.first + message.rows for message in relayed(simulation)]

    assert ends == [roots[message.round] for message in relayed(simulation)]
    assert all(
        heard.index(features) > heard.index(reroot)
        for reroot, features in zip(
            [message for message in heard if isinstance(message, Reroot)], relayed(simulation), strict=True
        )
    )


def test_no_round_waits_for_features_or_changes_by_them():
    """The same run, event by event, whether the features arrive or not."""
    runs = []
    for lost in (False, True):
        simulation = pipeline()
        simulation.holds = lambda message, lost=lost: lost and isinstance(message, Features)
        decoded(simulation)
        without = [
            (now, [command for command in commands if not isinstance(getattr(command, "message", None), Features)])
            for now, event, commands in simulation.history
            if not (isinstance(event, Arrived) and isinstance(event.message, Features))
        ]
        runs.append(without)
        assert bool(relayed(simulation)) is not lost

    assert runs[0] == runs[1]


def test_features_that_fit_no_committed_tokens_are_dropped():
    simulation = relaying()
    sequence = simulation.machine.requests[ONE]
    sent, stale = len(relayed(simulation)), simulation.machine.stale
    for sequence_id, round, first, rows in (
        (RequestId(99), 0, 0, 1),
        (ONE, sequence.round + 1, 0, 1),
        (ONE, sequence.round, sequence.position, 1),
    ):
        simulation.receive("target", simulation.own["target"], Features(sequence_id, round, RING, first, rows))

    assert len(relayed(simulation)) == sent
    assert simulation.machine.stale == stale + 3


def test_a_draft_that_sends_features_changes_nothing():
    simulation = relaying()
    commands = simulation.machine.step(
        Arrived("draft", simulation.own["draft"], Features(ONE, 0, RING, 0, 1)), simulation.now
    ).all()

    assert not any(isinstance(command, SendMessage) for command in commands)
