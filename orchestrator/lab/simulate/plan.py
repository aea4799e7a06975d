"""Predicts tokens/s of every strategy and baseline, on given devices with a given draft, as `launch-pipeline plan`
shows it. Pure."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean
from typing import Any

import msgspec

from orchestrator.core.options import Options
from orchestrator.lab.findings import Bar, Field, Findings, Panel, Table, tabulated
from orchestrator.lab.simulate.acceptance import AcceptanceModel, Language, ModelledLanguage
from orchestrator.lab.simulate.devices import Devices, Wire, Wires
from orchestrator.lab.simulate.simulation import SimulatedClient
from orchestrator.machine.profiles.device_profiles import DeviceProfile
from protocol.messages.base import NodeId
from protocol.worker.pacing import DevicePace

Agreement = Callable[[int, int], bool]
"""Whether the draft's token at (request, position) is accepted."""


@dataclass(frozen=True, slots=True)
class DecodingTime:
    """Rounds and time for a number of tokens."""

    tokens: int
    rounds: int
    seconds: float


def plain_decoding(devices: Devices, first: int, tokens: int) -> DecodingTime:
    """Plain decoding without messages, from absolute position `first` on."""
    return DecodingTime(tokens, tokens, sum(devices.target.forward(1, first - 1 + done) for done in range(tokens)))


def turn_taking(
    devices: Devices, agrees: Agreement, draft_tokens: int, request: int, first: int, tokens: int
) -> DecodingTime:
    """`tokens` tokens from absolute position `first` on, with `draft_tokens` draft tokens a round."""
    done = rounds = 0
    seconds = 0.0
    behind = 1
    while done < tokens:
        drafted = min(draft_tokens, tokens - done - 1)
        accepted = 0
        while accepted < drafted and agrees(request, first + done + accepted):
            accepted += 1
        seconds += _round(devices, first - 1 + done, drafted, behind)
        # If all tokens are accepted, the draft has not evaluated its last token yet.
        behind = 2 if accepted == drafted else 1
        done += accepted + 1
        rounds += 1
    return DecodingTime(done, rounds, seconds)


def agreement(language: Language, acceptance: AcceptanceModel | None) -> Agreement:
    """At temperature 0, where `acceptance` is None: the draft's best guess is the target's token.

    Else two independent draws agree with the probability that `acceptance` gives.
    """
    if acceptance is None:
        return lambda request, position: _guessed(language, request, position)
    chances = ModelledLanguage(acceptance)
    return lambda request, position: chances.rank_at(request, position, chances.accept_at(request, position)) == 1


def _guessed(language: Language, request: int, position: int) -> bool:
    best = language.candidates(request, NodeId(position), position, on_target_path=True, limit=1)
    return list(best.tokens) == [language.token(request, position)]


def _round(devices: Devices, context: int, drafted: int, behind: int) -> float:
    """Seconds of a round behind `context` tokens."""
    if drafted == 0:
        return devices.target.forward(1, context)
    draft = devices.baseline_draft
    alone = draft.forward(behind, context) + (drafted - 1) * draft.forward(1, context)
    return alone + devices.target.forward(1 + drafted, context)


PLAIN_NAME = "mlx-lm"
BASELINE_NAME = "mlx-lm, speculative"
ORACLE = "adaptive, draft takes no time"
_MAX_BASELINE_TOKENS = 8
_NO_TIME = 1e-6
"""Seconds. Above zero, so that a growth step has an end."""
GREEDY = AcceptanceModel(accept=0.81, exponent=1.27, spread=2.14, claim_slope=0.93, claim_shift=-1.96)
SAMPLED = AcceptanceModel(
    accept=0.67, exponent=2.17, spread=1.45, claim_slope=1.03, claim_shift=-1.55, independent=0.172
)
"""The demo pair on held-out library code at temperature 0 and 1: 12 prompts, 1800 tokens (docs/lab/planning.md)."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What is decoded, and on which devices."""

    devices: Devices
    wires: Wires = field(default_factory=Wires)
    acceptance: AcceptanceModel = GREEDY
    temperature: float = 0.0
    options: Options = field(default_factory=Options)
    """Of the speculating strategies; the strategy's name is replaced."""
    tokens: int = 256
    """Of each request."""
    requests: int = 3
    """Served one after the other; the controller keeps its estimates."""

    @property
    def language(self) -> Language:
        return ModelledLanguage(self.acceptance)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One strategy or baseline. None: it has no such rate."""

    contender: str
    tokens_per_second: float
    tokens_per_round: float
    hit_rate: float | None = None
    acceptance_rate: float | None = None
    target_busy: float | None = None
    draft_busy: float | None = None


def predict(scenario: Scenario) -> list[Prediction]:
    """The baselines, our strategies, then the bound of a draft that takes no time."""
    ours = [simulated(scenario, strategy) for strategy in ("ar", "sd", "ssd", "adaptive")]
    return [plain(scenario), *baseline_prediction(scenario), *ours, oracle(scenario)]


def plain(scenario: Scenario) -> Prediction:
    """mlx-lm without a draft."""
    decoded = [
        plain_decoding(scenario.devices, len(scenario.language.prompt(request)), scenario.tokens)
        for request in range(scenario.requests)
    ]
    return _prediction(PLAIN_NAME, decoded)


def baseline_prediction(scenario: Scenario) -> list[Prediction]:
    """mlx-lm with its best number of draft tokens; nothing if its acceptance is unknown."""
    independent = None
    if scenario.temperature > 0:
        if scenario.acceptance.independent is None:
            return []
        independent = replace(scenario.acceptance, accept=scenario.acceptance.independent)
    agrees = agreement(scenario.language, independent)
    tried = [_turn_taking(scenario, agrees, depth) for depth in range(1, _MAX_BASELINE_TOKENS + 1)]
    return [max(tried, key=lambda prediction: prediction.tokens_per_second)]


def simulated(scenario: Scenario, strategy: str, name: str | None = None) -> Prediction:
    """One of our strategies, through the real state machine. Raises AssertionError if a token is not the target's."""
    # The command line loads no MLX before it simulates.
    from orchestrator.lab.simulate.workers import modelled_pipeline

    options = msgspec.structs.replace(scenario.options, strategy=strategy)
    simulation = modelled_pipeline(options, scenario.language, scenario.devices, scenario.wires)
    for request in range(scenario.requests):
        simulation.submit(request, scenario.tokens, scenario.temperature)
        simulation.run()
    clients = simulation.clients.values()
    assert all(client.tokens == client.reference for client in clients)
    return _from_statistics(name or strategy, clients)


def oracle(scenario: Scenario) -> Prediction:
    """The adaptive strategy with a draft that takes no time: what draft quality, tree and target allow."""
    instant = DevicePace(steps=((1, _NO_TIME),), prefill_rate=1e9)
    devices = replace(scenario.devices, draft=instant, slow_down=1.0)
    wires = Wires(scenario.wires.target, Wire(delay=0.0))
    return simulated(replace(scenario, devices=devices, wires=wires), "adaptive", ORACLE)


def pays_from(scenario: Scenario, gain: float = 1.1, steps: int = 6) -> float | None:
    """The lowest acceptance with which `adaptive` reaches `gain` times plain decoding; None if none does.

    Found by bisection to 2^-`steps`, on text without repetition, so that prompt lookup does not help.
    """
    brief = replace(scenario, requests=1)
    goal = gain * simulated(brief, "ar").tokens_per_second

    def reaches(accept: float) -> bool:
        changed = replace(brief, acceptance=replace(scenario.acceptance, accept=accept))
        return simulated(changed, "adaptive").tokens_per_second >= goal

    low, high = 0.0, 1.0
    if not reaches(high):
        return None
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (low, middle) if reaches(middle) else (middle, high)
    return high


def _turn_taking(scenario: Scenario, agrees: Agreement, depth: int) -> Prediction:
    reached = []
    for request in range(scenario.requests):
        first = len(scenario.language.prompt(request))
        reached.append(turn_taking(scenario.devices, agrees, depth, request, first, scenario.tokens))
    return _prediction(f"{BASELINE_NAME}, K = {depth}", reached)


def _prediction(name: str, reached: Sequence[DecodingTime]) -> Prediction:
    tokens = sum(one.tokens for one in reached)
    return Prediction(
        contender=name,
        tokens_per_second=tokens / sum(one.seconds for one in reached),
        tokens_per_round=tokens / sum(one.rounds for one in reached),
    )


def _from_statistics(name: str, clients: Iterable[SimulatedClient]) -> Prediction:
    figures = [client.statistics for client in clients if client.statistics is not None]
    tokens = sum(figure.generated_tokens for figure in figures)
    return Prediction(
        contender=name,
        tokens_per_second=tokens / sum(figure.generated_tokens / figure.tokens_per_second for figure in figures),
        tokens_per_round=tokens / sum(figure.rounds for figure in figures),
        hit_rate=_mean(figure.hit_rate for figure in figures),
        acceptance_rate=_mean(figure.acceptance_rate for figure in figures),
        target_busy=_mean(figure.target_busy for figure in figures),
        draft_busy=_mean(figure.draft_busy for figure in figures),
    )


def _mean(values: Iterator[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return mean(known) if known else None


# Findings -----------------------------------------------------------------------------------------

_MIN_GAIN = 1.1


def plan_findings(
    profile: DeviceProfile, plans: Sequence[tuple[Scenario, Sequence[Prediction], float | None]]
) -> Findings:
    """Scenarios with their predictions, and the acceptance from which a draft pays."""
    return Findings(
        title=f"Predicted for {profile.name}",
        conditions=(f"Predicted for {profile.name}: {profile.description}.",),
        tables=tuple(_plan_table(*plan) for plan in plans),
        panels=tuple(_bars(scenario, predictions) for scenario, predictions, _ in plans),
        figures={
            "profile": profile.name,
            "plans": [
                {
                    **_circumstances(scenario),
                    "pays_from_acceptance": threshold,
                    "predictions": msgspec.to_builtins(predictions),
                }
                for scenario, predictions, threshold in plans
            ],
        },
    )


def _plan_table(scenario: Scenario, predictions: Sequence[Prediction], pays_from: float | None) -> Table:
    plain = next(one.tokens_per_second for one in predictions if one.contender == PLAIN_NAME)
    spec = next((one.tokens_per_second for one in predictions if one.contender.startswith(BASELINE_NAME)), None)
    fields: list[Field[Prediction]] = [
        Field("contender", lambda one: one.contender),
        Field("tok/s", lambda one: one.tokens_per_second, ".1f"),
        Field("x mlx-lm", lambda one: one.tokens_per_second / plain, ".2f"),
        Field("x its spec", lambda one: spec and one.tokens_per_second / spec, ".2f"),
        Field("tok/round", lambda one: one.tokens_per_round, ".2f"),
        Field("hit", lambda one: one.hit_rate, ".0%"),
        Field("accept", lambda one: one.acceptance_rate, ".0%"),
        Field("target", lambda one: one.target_busy, ".0%"),
        Field("draft", lambda one: one.draft_busy, ".0%"),
    ]
    acceptance = scenario.acceptance
    assumed = (
        f"Modelled: best guess right {acceptance.accept:.0%}, exponent {acceptance.exponent:g}, spread "
        f"{acceptance.spread:g}."
    )
    note = f"{_verdict(predictions, pays_from)} {assumed}"
    table = tabulated(f"temperature {scenario.temperature:g}", fields, predictions, note=note)
    return msgspec.structs.replace(table, origin="computed")


def _bars(scenario: Scenario, predictions: Sequence[Prediction]) -> Panel:
    speeds = [(one.contender, one.tokens_per_second) for one in predictions]
    bars = tuple(
        Bar(name, speed, speed, speed, baseline=name.startswith(PLAIN_NAME), hypothetical=name.startswith(ORACLE))
        for name, speed in speeds
    )
    return Panel(title=f"temperature {scenario.temperature:g}", x="tokens/s", bars=bars)


def _verdict(predictions: Sequence[Prediction], pays_from: float | None) -> str:
    """Whether a draft would pay, and the acceptance that it needs."""
    speed = {prediction.contender: prediction.tokens_per_second for prediction in predictions}
    gain = speed["adaptive"] / speed["ar"]
    figures = f"{speed['adaptive']:.1f} tokens/s with it, {speed['ar']:.1f} without, {gain:.2f} times"
    verdict = "A draft would pay" if gain >= _MIN_GAIN else "A draft would hardly pay"
    if pays_from is None:
        return f"{verdict}: {figures}. A draft this slow would not, at any acceptance."
    return (
        f"{verdict}: {figures}. A draft this fast pays if its best guess is right in at least {pays_from:.0%} of cases."
    )


def _circumstances(scenario: Scenario) -> dict[str, Any]:
    acceptance = scenario.acceptance
    return {
        "temperature": scenario.temperature,
        "acceptance": acceptance.accept,
        "exponent": acceptance.exponent,
        "spread": acceptance.spread,
        "independent": acceptance.independent,
    }
