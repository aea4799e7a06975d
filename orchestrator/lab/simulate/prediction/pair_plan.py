"""What each draft of a target would bring on a device, by the simulator: in turns on the target's device. Pure.

A step of a draft takes as long as the target's device takes for as many bytes of the target's weights. Features are
fresh, text never repeats itself, and verified tokens cost what the device's profile says for its own target.
"""

from dataclasses import replace
from typing import NamedTuple

from orchestrator.core.options import Options
from orchestrator.lab.simulate.devices import Devices, stretched
from orchestrator.lab.simulate.prediction.plan import GREEDY, Scenario, plain, simulated
from orchestrator.lab.simulate.prediction.sweep import DRAFTERS, with_acceptance, with_draft_step
from orchestrator.machine.pairs.expectations import in_proportion
from orchestrator.machine.pairs.recommended_pairs import Model, Pair
from orchestrator.machine.profiles.device_profiles import DeviceProfile

_TOKENS = 192
"""One request: a tenth of a second of processor time."""


class Guess(NamedTuple):
    """How often a guess is right whose parent is right."""

    accept: float
    published: bool
    """Whether others measured it with this very draft; otherwise it is assumed."""
    on: str
    """On what text, or what it is assumed from."""


class PairPlan(NamedTuple):
    """At temperature 0."""

    plain: float
    """Tokens a second without a draft."""
    tokens_per_second: float
    tokens_per_round: float

    @property
    def gain(self) -> float:
        return self.tokens_per_second / self.plain


def guess(draft: Model) -> Guess:
    """What is published about a draft's guesses, or assumed of its kind."""
    if draft.published is not None:
        chains = draft.published
        return Guess(chains.accept, True, f"{chains.tokens:g} tokens a round of {chains.guesses} guesses, {chains.on}")
    drafter = None if draft.kind is None else DRAFTERS[draft.kind]
    if drafter is None:
        return Guess(GREEDY.accept, False, "the demo pair's draft on Python code")
    if drafter.accept is None:
        return Guess(_like_eagle3(), False, "EAGLE-3 on chat")
    return Guess(drafter.accept, False, drafter.source)


def plan_pair(pair: Pair, profile: DeviceProfile, on_processor: bool) -> PairPlan | None:
    """None if the profile does not say what weights it was measured with, or if the target's are of quite another
    size."""
    factor = in_proportion(profile.target, pair.target.read(on_processor))
    if factor is None:
        return None
    devices = Devices.of(profile)
    target = stretched(devices.target, factor)
    scenario = Scenario(
        devices=replace(
            devices, target=target, draft=devices.baseline_draft, slow_down=1.0, draft_block=_block(pair.draft)
        ),
        options=Options(placement="shared"),
        tokens=_TOKENS,
        requests=1,
    )
    step = target.forward(1) * pair.draft_read(on_processor) / pair.target.read(on_processor)
    scenario = with_acceptance(with_draft_step(scenario, 1000 * step), guess(pair.draft).accept)
    ours = simulated(scenario, "adaptive")
    return PairPlan(plain(scenario).tokens_per_second, ours.tokens_per_second, ours.tokens_per_round)


def _block(draft: Model) -> int:
    """Tokens that one forward guesses behind one another."""
    usual = 1 if draft.kind is None else DRAFTERS[draft.kind].block
    return usual if usual == 1 or draft.published is None else draft.published.guesses


def _like_eagle3() -> float:
    accept = DRAFTERS["eagle3"].accept
    assert accept is not None
    return accept
