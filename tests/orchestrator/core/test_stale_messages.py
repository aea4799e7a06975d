"""A hundred thousand messages of other lives, old rounds and requests that are over: none is acted on."""

import random

import msgspec

from orchestrator.core.commands import SendMessage
from orchestrator.core.events import Arrived, Ended
from orchestrator.core.phases import Phase
from protocol.messages.base import NodeId, SequenceId
from protocol.messages.worker import Fault, Grow, Pong, Prefilled, Verdict
from tests.support.scripted_simulation import ScriptedSimulation, ready
from tests.support.simulated_hours.invariants import reachable

LIVE, OVER, UNKNOWN = SequenceId(2), SequenceId(1), SequenceId(77)
MANY = 100_000


def in_the_middle() -> ScriptedSimulation:
    """One request is over, one is under verification."""
    simulation = ready()
    simulation.submit(OVER, max_tokens=20)
    simulation.run()
    simulation.submit(LIVE, max_tokens=300)
    sequence = simulation.machine.sequences[LIVE]
    simulation.run_while(lambda: sequence.round < 12 or sequence.phase is not Phase.VERIFYING)
    for role, incarnation in simulation.own.items():
        simulation.step(Arrived(role, incarnation, Pong(0.0)))
    return simulation


def state(simulation: ScriptedSimulation) -> list[int | float | str | None]:
    """All plain values that the machine holds but the count of what was not acted on."""
    machine = simulation.machine
    stale, machine.stale = machine.stale, 0
    values = [item for item in reachable(machine) if isinstance(item, int | float | str | None)]
    machine.stale = stale
    return values


def stale_event(simulation: ScriptedSimulation, source: random.Random) -> Arrived:
    """Something that was once true, or is true of others."""
    sequence = simulation.machine.sequences[LIVE]
    target, draft = simulation.own["target"], simulation.own["draft"]
    old = source.randrange(sequence.round)
    path = tuple(NodeId(source.getrandbits(62)) for _ in range(source.randrange(1, 4)))
    growth = Grow(LIVE, old, (sequence.tree.root.id,), (3,), (0.9,), 1, 0.01)
    verdict = Verdict(LIVE, old, (), 3, 0.01)
    return source.choice(
        (
            lambda: Arrived("target", target, verdict),
            lambda: Arrived("target", target, msgspec.structs.replace(verdict, round=sequence.round + 1)),
            lambda: Arrived("target", target, msgspec.structs.replace(verdict, round=sequence.round, path=path)),
            lambda: Arrived("target", target, msgspec.structs.replace(verdict, sequence=OVER)),
            lambda: Arrived("target", target + source.choice((-1, 1)), verdict),
            lambda: Arrived("target", target, Prefilled(LIVE, old, 2, 0.01)),
            lambda: Arrived("target", target, Prefilled(LIVE, sequence.round, 2, 0.01)),
            lambda: Arrived("target", target, Fault("lost", "late", OVER)),
            lambda: Arrived("target", target, Fault("refused", "late", UNKNOWN)),
            lambda: Arrived("draft", draft + source.choice((-1, 1)), growth),
            lambda: Arrived("draft", draft, msgspec.structs.replace(growth, sequence=OVER)),
            lambda: Arrived("draft", draft, Fault("lost", "late", UNKNOWN)),
        )
    )()


def test_stale_messages_change_nothing_and_are_counted():
    simulation, source = in_the_middle(), random.Random(5)
    before, counted = state(simulation), simulation.machine.stale
    for _ in range(MANY):
        assert simulation.machine.step(stale_event(simulation, source), simulation.now) == []

    assert state(simulation) == before
    assert simulation.machine.stale == counted + MANY
    simulation.run()
    assert len(simulation.clients[LIVE].tokens) == 300
    assert simulation.machine.sequences == {}


def test_growth_that_comes_again_in_any_order_adds_no_node_and_asks_for_nothing():
    simulation, source = in_the_middle(), random.Random(6)
    tree = simulation.machine.sequences[LIVE].tree
    nodes = sorted(node.id for node in tree)
    known = [node for node in tree if node.parent is not None]
    for _ in range(MANY // 10):
        some = source.sample(known, min(len(known), 4))
        parents = tuple(node.parent.id for node in some if node.parent is not None)
        tokens = tuple(node.token for node in some)
        growth = Grow(LIVE, source.randrange(9), parents, tokens, tuple(0.5 for _ in some), 1, 0.004)
        assert simulation.machine.step(Arrived("draft", simulation.own["draft"], growth), simulation.now) == []

    assert sorted(node.id for node in tree) == nodes


def test_the_state_that_is_compared_notices_a_change():
    """Otherwise the tests above could not fail."""
    simulation = in_the_middle()
    before = state(simulation)
    commands = simulation.step(Ended(LIVE, "cancelled"))

    assert any(isinstance(command, SendMessage) for command in commands)
    assert state(simulation) != before
