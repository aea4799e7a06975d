"""Laws of a matrix on its way: from the draft that has it to the target that asks, and nobody else has a say."""

from msgspec.structs import replace

from orchestrator.core.events import Arrived, WorkerUp
from orchestrator.lab.simulate.workers import modelled_hello
from orchestrator.runtime.workers.projection_relay import ProjectionArrived, ProjectionRelay
from protocol.messages.features import FeatureForm, Projection, ProjectionBlock, ProjectionShipment, ProjectionWanted


def up(incarnation: int, key: int | None = None) -> WorkerUp:
    """A draft whose matrix has this key; a target without one."""
    if key is None:
        return WorkerUp(incarnation, modelled_hello("target"))
    return WorkerUp(
        incarnation, replace(modelled_hello("draft"), features=FeatureForm((1, 4), 64, Projection(32, key)))
    )


def wanted(key: int, incarnation: int = 1) -> Arrived:
    return Arrived("target", incarnation, ProjectionWanted(key, 0))


def rows(key: int, incarnation: int) -> ProjectionArrived:
    return ProjectionArrived(incarnation, ProjectionShipment(ProjectionBlock(key, 0, 1, 1), b""))


def test_a_request_goes_to_the_draft_of_that_matrix_and_its_rows_to_the_target():
    relay = ProjectionRelay()
    for event in (up(1), up(2, key=5), up(3, key=6)):
        relay.note(event)

    assert [relay.wanted(wanted(key)) for key in (5, 6, 7)] == [2, 3, None]
    assert [relay.carried(rows(5, 2)), relay.carried(rows(6, 3))] == [1, 1]


def test_rows_of_another_drafts_matrix_and_requests_of_others_go_nowhere():
    relay = ProjectionRelay()
    for event in (up(1), up(2, key=5), up(3, key=6)):
        relay.note(event)

    assert relay.carried(rows(5, 3)) is None
    assert relay.carried(rows(7, 2)) is None
    assert relay.wanted(wanted(5, incarnation=3)) is None


def test_the_next_life_of_a_draft_and_of_a_target_takes_over():
    relay = ProjectionRelay()
    for event in (up(1), up(2, key=5), up(4), up(6, key=5)):
        relay.note(event)

    assert relay.wanted(wanted(5, incarnation=4)) == 6
    assert relay.carried(rows(5, 6)) == 4
    assert relay.carried(rows(5, 2)) is None
