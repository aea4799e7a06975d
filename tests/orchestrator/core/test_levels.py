"""Laws of levels, in virtual time: a target is sent only what one forward of it can verify. Tokens stay its own."""

import pytest
from msgspec.structs import replace

from orchestrator.core.commands import Emit, SendMessage, TrialDecided
from orchestrator.core.options import Options
from orchestrator.core.policy.strategies import STRATEGIES
from orchestrator.lab.simulate.acceptance import AcceptanceModel, ModelledLanguage
from orchestrator.lab.simulate.worker_host import BuildWorker, SimulatedWorker
from orchestrator.lab.simulate.workers import ModelledDraft, ModelledTarget, modelled_workers
from protocol.messages.base import Level, Role
from protocol.messages.worker import Forest, Reroot, Start, Stop
from protocol.speculation.token_tree import fits
from tests.support.scripted_simulation import CONTEXT, DEVICES, DRAFT, LANGUAGE, ONE, TARGET, ScriptedSimulation, ready

LEVELS: tuple[Level, ...] = ("tree", "chain", "plain")


def building(level: Level, accept: float = 0.7) -> BuildWorker:
    language = ModelledLanguage(AcceptanceModel(accept=accept), seed=1, prompt_tokens=3)
    return modelled_workers(language, DEVICES, CONTEXT, level)


def assert_exact(simulation: ScriptedSimulation) -> None:
    simulation.run()
    assert all(client.tokens == client.reference for client in simulation.clients.values())


@pytest.mark.sampled(16)
@pytest.mark.parametrize("requests", [1, 3])
@pytest.mark.parametrize("accept", [0.3, 0.9])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("level", LEVELS)
def test_every_tree_fits_the_target(level: Level, strategy: str, accept: float, requests: int):
    simulation = ready(strategy, building(level, accept))
    for request in range(requests):
        simulation.submit(request, 40, temperature=request % 2)
    assert_exact(simulation)

    assert all(fits(verify.parents, level) for verify in simulation.trees())


@pytest.mark.parametrize("fallback", ["neural", "fast", "adaptive"])
@pytest.mark.parametrize("strategy", ["sd", "ssd", "adaptive"])
@pytest.mark.parametrize(("level", "least"), [("tree", 1.4), ("chain", 1.2)])
def test_guesses_save_rounds(strategy: str, fallback: str, level: Level, least: float):
    simulation = ready(strategy, building(level), fallback=fallback)
    simulation.submit(1, 60)
    assert_exact(simulation)

    assert simulation.statistics().tokens_per_round > least
    assert all(fits(verify.parents, level) for verify in simulation.trees())


@pytest.mark.parametrize("draft_tokens", [1, 4, 9])
def test_text_that_repeats_is_guessed_along_one_path(draft_tokens: int):
    """Prompt lookup guesses, and there is no draft."""
    for strategy in ("ssd", "adaptive"):
        simulation = ScriptedSimulation(Options(strategy=strategy, draft_tokens=draft_tokens), building("chain"))
        simulation.start("target")
        simulation.submit(1, 60, prompt=tuple(LANGUAGE.token(1, position) for position in range(60)))
        assert_exact(simulation)

        assert all(fits(verify.parents, "chain") for verify in simulation.trees())


@pytest.mark.thorough
def test_a_chain_target_with_a_draft_is_faster_than_alone_and_no_faster_than_with_trees():
    def seconds(strategy: str, level: Level) -> float:
        simulation = ready(strategy, building(level, accept=0.8))
        simulation.submit(1, 200)
        assert_exact(simulation)
        return simulation.now

    alone, path, trees = seconds("ar", "chain"), seconds("adaptive", "chain"), seconds("adaptive", "tree")
    assert trees <= 1.02 * path
    assert path < 0.9 * alone


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("dependent", "level"), [(True, "tree"), (False, "tree"), (True, "chain")])
def test_who_chose_a_seed_shares_no_forward_where_others_may_change_its_tokens(
    strategy: str, dependent: bool, level: Level
):
    """Requests have rounds in their turns as ever. Below level tree no forwards are shared."""

    def build(role: Role) -> SimulatedWorker:
        worker = building(level)(role)
        worker.hello = replace(worker.hello, batch_dependent=dependent and role == "target")
        return worker

    simulation = ready(strategy, build)
    ids = [simulation.submit(number, 40, seeded=number < 2) for number in range(5)]
    simulation.run_while(lambda: len(simulation.live) == 5)
    together = [{tree.request for tree in forest.trees} for forest in simulation.sent(Forest)]
    tokens = [len(client.tokens) for client in simulation.clients.values()]
    assert_exact(simulation)

    assert any({*ids[2:]} <= each for each in together)
    assert any({*ids[:2]} & each for each in together) is not (dependent and level == "tree")
    assert min(tokens) > 40 / 4


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_without_guesses_every_strategy_is_plain_decoding(strategy: str):
    """No wait, no work for the draft, and the target may begin early."""
    plain, alone = ready(strategy, building("plain")), ready("ar", building("tree"))
    for simulation in (plain, alone):
        simulation.submit(1, 40)
        assert_exact(simulation)

    assert plain.now == alone.now
    assert [verify.plain_next for verify in plain.trees()] == [True] * 39 + [False]
    assert not [command for command in plain.commands if isinstance(command, SendMessage) and command.role == "draft"]
    figures = plain.statistics()
    assert (figures.rounds, figures.hit_rate, figures.acceptance_rate, figures.draft_busy) == (40, None, None, 0.0)
    assert {command.hit for command in plain.commands if isinstance(command, Emit)} == {None}


def test_no_draft_wins_or_loses_beside_a_target_that_verifies_no_guesses():
    simulation = ready("adaptive", building("plain"))
    simulation.attach(ModelledDraft(LANGUAGE, DRAFT, CONTEXT))
    simulation.submit(1, 300)
    assert_exact(simulation)

    assert not [command for command in simulation.commands if isinstance(command, TrialDecided)]
    assert not simulation.sent(Reroot)


class SuccessiveTargets:
    """Builds a target of the next level at each start."""

    def __init__(self, *levels: Level) -> None:
        self._levels = iter(levels)

    def __call__(self, role: Role) -> SimulatedWorker:
        if role == "draft":
            return ModelledDraft(LANGUAGE, DRAFT, CONTEXT)
        return ModelledTarget(LANGUAGE, TARGET, CONTEXT, next(self._levels))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("drafts", [1, 2])
@pytest.mark.parametrize("strategy", ["sd", "ssd", "adaptive"])
def test_a_target_of_another_level_continues_every_request(strategy: str, drafts: int):
    levels: tuple[Level, ...] = ("tree", "plain", "chain", "plain", "tree")
    simulation = ready(strategy, SuccessiveTargets(*levels), concurrent=2)
    if drafts == 2:
        simulation.attach(ModelledDraft(LANGUAGE, DRAFT, CONTEXT))
    for request in range(3):
        simulation.submit(request, 200)
    widths = []
    for level in levels:
        if widths:
            simulation.kill("target")
            simulation.start("target")
        before = len(simulation.trees())
        simulation.run_events(80)
        trees = simulation.trees()[before:]
        assert all(fits(verify.parents, level) for verify in trees)
        widths.append(max(len(verify.tokens) for verify in trees) > 1)
    assert_exact(simulation)

    assert widths == [level != "plain" for level in levels]


def test_the_draft_is_stopped_and_started_as_the_targets_change():
    simulation = ready("adaptive", SuccessiveTargets("tree", "plain", "tree"))
    simulation.submit(1, 200)
    draft = simulation.own["draft"]

    def heard() -> list[str]:
        simulation.run_events(60)
        return [type(message).__name__ for kind in (Start, Stop) for message in simulation.sent(kind, draft)]

    assert heard() == ["Start"]
    simulation.kill("target")
    simulation.start("target")
    rerooted = len(simulation.sent(Reroot, draft))
    assert heard() == ["Start", "Stop"]
    assert len(simulation.sent(Reroot, draft)) == rerooted
    simulation.kill("target")
    simulation.start("target")
    assert heard() == ["Start", "Start", "Stop"]
    assert len(simulation.sent(Reroot, draft)) > rerooted
    assert_exact(simulation)
    assert simulation.clients[ONE].reason == "length"
