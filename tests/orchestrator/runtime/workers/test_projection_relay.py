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


def relay(*events: WorkerUp) -> ProjectionRelay:
    made = ProjectionRelay()
    for event in events or (up(1), up(2, key=5), up(3, key=6)):
        made.note(event)
    return made


def test_a_request_goes_to_the_draft_of_that_matrix_and_its_rows_to_the_target():
    between = relay()

    for key, draft in ((5, 2), (6, 3)):
        assert between.wanted(wanted(key)) == draft
        assert between.carried(rows(key, draft)) == 1
    assert between.wanted(wanted(7)) is None


def test_rows_that_nobody_asked_for_and_requests_of_others_go_nowhere():
    between = relay()
    unasked = between.carried(rows(5, 2))
    stranger = between.wanted(wanted(5, incarnation=3))
    between.wanted(wanted(5))
    another, anothers = between.carried(rows(6, 3)), between.carried(rows(5, 3))
    first, again = between.carried(rows(5, 2)), between.carried(rows(5, 2))

    assert [unasked, stranger, another, anothers, again] == [None] * 5
    assert first == 1


def test_the_next_life_of_a_draft_and_of_a_target_takes_over():
    between = relay(up(1), up(2, key=5), up(4), up(6, key=5))

    assert between.wanted(wanted(5, incarnation=4)) == 6
    assert between.carried(rows(5, 2)) is None
    assert between.carried(rows(5, 6)) == 4


def test_a_draft_that_comes_again_and_again_with_other_matrices_fills_no_memory():
    between = relay(up(1), *(up(2 + key, key=key) for key in range(1000)))

    assert between.wanted(wanted(0)) is None
    assert between.wanted(wanted(999)) == 1001
