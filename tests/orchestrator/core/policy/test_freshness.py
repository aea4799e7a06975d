"""Laws of giving up a hit for guesses that know the target's latest features."""

import random
from statistics import mean

import pytest
from msgspec.structs import replace

from orchestrator.core.estimates import Freshness
from orchestrator.core.options import Options
from orchestrator.lab.simulate.worker_host import SimulatedWorker, Work
from orchestrator.lab.simulate.workers import ModelledDraft, ModelledTarget
from protocol.messages.base import NodeId, Role
from protocol.messages.features import FeatureForm, Taps
from protocol.messages.worker import Reroot, Start, ToWorker
from protocol.speculation.token_tree import Candidates
from protocol.worker.pacing import DevicePace
from tests.support.scripted_simulation import LANGUAGE, TARGET, ScriptedSimulation
from tests.support.simulation import Simulation


def choices(cached: float, fresh: float, cached_seconds: float, fresh_seconds: float, hits: int = 4000) -> list[bool]:
    """What is chosen at each hit, if these are the mean tokens and the seconds of a round."""
    source, freshness, chosen = random.Random(5), Freshness(), []
    for _ in range(hits):
        chosen.append(freshness.choose())
        tokens = 1 + sum(source.random() < ((fresh if chosen[-1] else cached) - 1) / 8 for _ in range(8))
        freshness.observe(chosen[-1], tokens, fresh_seconds if chosen[-1] else cached_seconds)
    return chosen


def test_waiting_that_pays_becomes_the_rule():
    chosen = choices(2.0, 4.0, cached_seconds=0.020, fresh_seconds=0.030)

    assert sum(chosen[1000:]) > 0.9 * 3000


def test_waiting_that_does_not_pay_is_tried_ever_more_rarely():
    chosen = choices(3.0, 3.5, cached_seconds=0.020, fresh_seconds=0.030)

    assert sum(chosen[:400]) < 40
    assert sum(chosen[1000:]) < 0.02 * 3000


@pytest.mark.parametrize("fresh", [False, True])
def test_the_choice_follows_a_text_that_changes(fresh: bool):
    source, freshness, chosen = random.Random(6), Freshness(), []
    for hit in range(20_000):
        chosen.append(freshness.choose())
        better = fresh ^ (hit < 5000)
        tokens = source.choice([3, 4, 5]) if chosen[-1] == better else source.choice([1, 2, 3])
        freshness.observe(chosen[-1], tokens, 0.020 + 0.004 * chosen[-1])

    assert sum(choice == fresh for choice in chosen[-2000:]) > 1800


class FadingLanguage:
    """Its guesses know the target up to the root only: the further below they are, the more often they are wrong."""

    def __init__(self, fading: float) -> None:
        self._fading = fading
        self.root = 0
        """Position of the draft's root."""

    def prompt(self, request: int) -> tuple[int, ...]:
        return LANGUAGE.prompt(request)

    def token(self, request: int, position: int) -> int:
        return LANGUAGE.token(request, position)

    def candidates(self, request: int, node: NodeId, position: int, on_target_path: bool, limit: int) -> Candidates:
        found = LANGUAGE.candidates(request, node, position, on_target_path, limit)
        right = random.Random(node).random() < self._fading ** (position - 1 - self.root)
        return found if right else found._replace(tokens=[token + 1 for token in found.tokens])


class FadingDraft(ModelledDraft):
    """Of one sequence."""

    def __init__(self, pace: DevicePace, fading: float, reads: bool) -> None:
        self._language = FadingLanguage(fading)
        super().__init__(self._language, pace)
        if reads:
            self.hello = replace(self.hello, features=FeatureForm((1,), 64))

    def handle(self, message: ToWorker) -> Work:
        if isinstance(message, Start):
            self._language.root = len(message.tokens) - 1
        if isinstance(message, Reroot):
            self._language.root = message.position + len(message.tokens)
        return super().handle(message)


def decoded(fading: float, step: float, reads: bool, strategy: str = "adaptive", tokens: int = 400) -> Simulation:
    def build(role: Role) -> SimulatedWorker:
        if role == "draft":
            return FadingDraft(DevicePace(steps=((1, step),), prefill_rate=4000.0), fading, reads)
        target = ModelledTarget(LANGUAGE, TARGET)
        target.hello = replace(target.hello, taps=Taps(12, 64))
        return target

    simulation = ScriptedSimulation(Options(strategy=strategy), build)
    for role in ("target", "draft"):
        simulation.start(role)
    sequence = simulation.submit(1, max_tokens=tokens)
    simulation.run()
    client = simulation.clients[sequence]
    assert client.tokens == client.reference
    return simulation


def renewals(simulation: Simulation) -> float:
    """Share of the rounds that gave up a hit."""
    assert isinstance(simulation, ScriptedSimulation)
    reroots = simulation.sent(Reroot)
    return sum(reroot.anew for reroot in reroots) / len(reroots)


def choosing(fading: float, step: float) -> tuple[float, float]:
    """Mean share of given up hits, and mean time relative to a draft that reads no features, over several lengths."""
    pairs = [
        (decoded(fading, step, reads=True, tokens=tokens), decoded(fading, step, reads=False, tokens=tokens))
        for tokens in (300, 380, 400, 460, 600)
    ]
    return mean(renewals(choice) for choice, _ in pairs), mean(choice.now / without.now for choice, without in pairs)


@pytest.mark.thorough
def test_guesses_that_fade_quickly_are_made_anew_and_decoding_is_faster():
    share, time = choosing(0.55, 0.002)

    assert share > 0.2
    assert time < 0.96


@pytest.mark.thorough
def test_guesses_that_last_are_kept_and_trying_costs_little():
    share, time = choosing(1.0, 0.004)

    assert share < 0.08
    assert time < 1.03


@pytest.mark.parametrize(("strategy", "reads"), [("sd", True), ("ssd", True), ("adaptive", False)])
def test_published_strategies_and_drafts_that_read_tokens_alone_give_up_no_hit(strategy: str, reads: bool):
    assert renewals(decoded(0.55, 0.004, reads=reads, strategy=strategy, tokens=200)) == 0.0
