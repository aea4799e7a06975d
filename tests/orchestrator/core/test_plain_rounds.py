"""Laws of rounds that the target may begin before they are asked for, in virtual time."""

from dataclasses import replace
from itertools import pairwise

import pytest
from msgspec import structs

from orchestrator.core.events import Arrived
from orchestrator.core.options import Options
from orchestrator.lab.simulate.acceptance import AcceptanceModel, ModelledLanguage
from orchestrator.lab.simulate.worker_host import SimulatedWorker, Work
from orchestrator.lab.simulate.workers import ModelledDraft, ModelledTarget, modelled_workers
from protocol.messages.base import Role
from protocol.messages.worker import Forest, ToWorker, Verdict, Verify
from protocol.speculation.token_tree import node_id
from tests.support.scripted_simulation import (
    CONTEXT,
    DEVICES,
    DRAFT,
    LANGUAGE,
    ONE,
    TARGET,
    TWO,
    ScriptedSimulation,
    ready,
)


def test_requests_that_share_plain_rounds_go_on_to_the_token_before_the_last():
    simulation = ready("ar")
    for number in (1, 2, 3):
        simulation.submit(number, 10, prompt=(7,))
    simulation.run()

    trees = simulation.trees()
    assert [tree.request for tree in trees] == [1, 2, 3] * 10
    assert [tree.plain_next for tree in trees] == [True] * 27 + [False] * 3
    assert len(simulation.sent(Forest)) == 10


def test_a_target_that_has_a_prompt_to_read_begins_no_round_of_the_others():
    devices = replace(DEVICES, target=structs.replace(TARGET, prefill_rate=50.0))
    simulation = ready("ar", modelled_workers(LANGUAGE, devices, CONTEXT))
    simulation.submit(1, 40)
    simulation.run_while(lambda: len(simulation.clients[ONE].tokens) < 5)
    simulation.submit(2, 4, prompt=tuple(range(2, 202)))
    simulation.run_while(lambda: len(simulation.clients[ONE].tokens) < 6)
    before = len(simulation.trees())
    simulation.run_while(lambda: not simulation.clients[TWO].tokens)
    alone = [tree for tree in simulation.trees()[before:] if tree.request == ONE]

    assert alone
    assert not any(tree.plain_next for tree in alone[:-1])
    simulation.run()
    assert all(client.tokens == client.reference for client in simulation.clients.values())


def _useless(seed: int = 3, **options) -> ScriptedSimulation:
    """A draft whose guesses are hardly ever right, and no guesses by prompt lookup."""
    language = ModelledLanguage(AcceptanceModel(accept=0.02, spread=1.0), seed=seed, prompt_tokens=3)
    simulation = ScriptedSimulation(Options(lookup="off", **options), modelled_workers(language, DEVICES, CONTEXT))
    simulation.language = language
    simulation.start("target")
    simulation.start("draft")
    return simulation


@pytest.mark.parametrize("placement", ["apart", "shared"])
def test_adaptive_goes_on_after_plain_rounds_and_its_tokens_are_the_targets_own(placement: str):
    simulation = _useless(placement=placement)
    simulation.submit(1, 300)
    simulation.run()
    trees = simulation.trees()

    assert simulation.clients[ONE].tokens == simulation.clients[ONE].reference
    assert sum(tree.plain_next for tree in trees) > len(trees) // 2
    for tree, next in pairwise(trees):
        assert not (tree.plain_next and len(tree.tokens) > 1)
        assert not tree.plain_next or next.round == tree.round + 1


class LateTarget(ModelledTarget):
    """It has always begun the forward over the root before a tree comes."""

    def handle(self, message: ToWorker) -> Work:
        if not isinstance(message, Verify) or len(message.tokens) == 1:
            return super().handle(message)
        work = super().handle(structs.replace(message, tokens=message.tokens[:1], parents=(-1,)))
        replies = [
            structs.replace(each, root_alone=True) if isinstance(each, Verdict) else each for each in work.replies
        ]
        return Work(tuple(replies), work.seconds)


def test_a_tree_that_came_too_late_counts_as_not_verified():
    def build(role: Role) -> SimulatedWorker:
        return LateTarget(LANGUAGE, TARGET, CONTEXT) if role == "target" else ModelledDraft(LANGUAGE, DRAFT, CONTEXT)

    simulation = ready("adaptive", build)
    simulation.submit(1, 40)
    simulation.run()
    figures = simulation.statistics()

    assert any(len(tree.tokens) > 1 for tree in simulation.trees())
    assert simulation.clients[ONE].tokens == simulation.clients[ONE].reference
    assert (figures.rounds, figures.acceptance_rate) == (40, None)


def test_a_verdict_of_the_root_alone_with_a_path_is_stale():
    simulation = ready("adaptive")
    simulation.submit(1, 40)
    simulation.run_while(lambda: not simulation.sent(Verify) or len(simulation.sent(Verify)[-1].tokens) == 1)
    tree = simulation.sent(Verify)[-1]
    path = (node_id(tree.root, tree.tokens[1]),)
    before = simulation.machine.stale
    verdict = Verdict(tree.request, tree.round, path, 1, 0.01, root_alone=True)

    assert simulation.step(Arrived("target", simulation.own["target"], verdict)) == []
    assert simulation.machine.stale == before + 1
