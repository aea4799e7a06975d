"""Predicts tokens/s of every strategy and baseline, on given devices with a given draft, as `launch-pipeline plan`
shows it. Pure."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import ceil
from statistics import mean
from typing import NamedTuple

import msgspec

from orchestrator.core.options import Options
from orchestrator.lab.findings import Field, Findings, Table, tabulated
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
    draft, block = devices.baseline_draft, devices.block
    alone = draft.forward(max(behind, block), context) + (ceil(drafted / block) - 1) * draft.forward(block, context)
    return alone + devices.target.forward(1 + drafted, context)


PLAIN_NAME = "mlx-lm"
BASELINE_NAME = "mlx-lm, speculative"
ORACLE = "adaptive, draft takes no time"
_MAX_BASELINE_TOKENS = 8
_ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9)
_NO_TIME = 1e-6
"""Seconds. Above zero, so that a growth step has an end."""
GREEDY = AcceptanceModel(accept=0.81, exponent=1.27, spread=2.14, claim_slope=0.93, claim_shift=-1.96)
SAMPLED = AcceptanceModel(
    accept=0.67, exponent=2.17, spread=1.45, claim_slope=1.03, claim_shift=-1.55, independent=0.172
)
"""The demo pair on held-out library code at temperature 0 and 1: 12 prompts, 1800 tokens (docs/lab/planning.md)."""
COOL = replace(SAMPLED, accept=0.444, exponent=0.45, independent=0.351)
"""The default pair at temperature 0.7, 18 prompts; spread and claims are SAMPLED's."""


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
    target_busy: float | None = None
    draft_busy: float | None = None


def predict(scenario: Scenario) -> list[Prediction]:
    """The baselines, our strategies, then the bound of a draft that takes no time."""
    ours = [simulated(scenario, strategy) for strategy in ("ar", "sd", "ssd", "adaptive")]
    return [plain(scenario), *baseline_prediction(scenario), *ours, oracle(scenario)]


def plain(scenario: Scenario) -> Prediction:
    """mlx-lm without a draft."""
    return _turn_taking(scenario, lambda *_: False, 0)


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


class Worth(NamedTuple):
    """What drafts that are right so often are worth."""

    accept: float
    baseline: Prediction | None
    in_turns: Prediction
    """`adaptive`, the draft on the target's device."""
    at_once: Prediction
    """`adaptive`, the draft on a device of its own."""
    bound: Prediction
    """The same with a draft that takes no time."""


def by_acceptance(scenario: Scenario) -> list[Worth]:
    """On text without repetition, so that prompt lookup does not help."""
    return [_worth(replace(scenario, requests=1), accept) for accept in _ACCEPTANCES]


def _worth(scenario: Scenario, accept: float) -> Worth:
    model, devices = scenario.acceptance, scenario.devices
    independent = model.independent and model.independent * accept / model.accept
    one = replace(scenario, acceptance=replace(model, accept=accept, independent=independent))
    # Two forwards at once take twice as long on one device.
    shared = replace(devices, draft=devices.baseline_draft, slow_down=2.0)
    options = msgspec.structs.replace(scenario.options, placement="shared")
    in_turns = simulated(replace(one, devices=shared, options=options), "adaptive")
    baseline = next(iter(baseline_prediction(one)), None)
    return Worth(accept, baseline, in_turns, simulated(one, "adaptive"), oracle(one))


def _turn_taking(scenario: Scenario, agrees: Agreement, depth: int) -> Prediction:
    reached = []
    for request in range(scenario.requests):
        first = len(scenario.language.prompt(request))
        reached.append(turn_taking(scenario.devices, agrees, depth, request, first, scenario.tokens))
    tokens = sum(one.tokens for one in reached)
    return Prediction(
        contender=f"{BASELINE_NAME}, K = {depth}" if depth else PLAIN_NAME,
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
        target_busy=_mean(figure.target_busy for figure in figures),
        draft_busy=_mean(figure.draft_busy for figure in figures),
    )


def _mean(values: Iterator[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return mean(known) if known else None


# Findings -----------------------------------------------------------------------------------------

_WORTH = (
    "tok/s. in turns: both models on the target's device, with K tokens a round, as mlx-lm, or adaptive; at once: the "
    "draft on a device of its own; no draft time: what that would be with a draft that takes no time."
)


def plan_findings(
    profile: DeviceProfile, plans: Sequence[tuple[Scenario, Sequence[Prediction], Sequence[Worth]]]
) -> Findings:
    """Scenarios with their predictions, and what drafts of other acceptances are worth."""
    return Findings(
        title=f"Predicted for {profile.name}",
        conditions=(f"Predicted for {profile.name}: {profile.description}.",),
        tables=tuple(table for plan in plans for table in (_plan_table(*plan[:2]), _worth_table(plan[0], plan[2]))),
        figures={
            "profile": profile.name,
            "plans": [
                {
                    "temperature": scenario.temperature,
                    **asdict(scenario.acceptance),
                    "by_acceptance": msgspec.to_builtins([each._asdict() for each in worth]),
                    "predictions": msgspec.to_builtins(predictions),
                }
                for scenario, predictions, worth in plans
            ],
        },
    )


def _plan_table(scenario: Scenario, predictions: Sequence[Prediction]) -> Table:
    plain = next(one.tokens_per_second for one in predictions if one.contender == PLAIN_NAME)
    spec = next((one.tokens_per_second for one in predictions if one.contender.startswith(BASELINE_NAME)), None)
    fields: list[Field[Prediction]] = [
        Field("contender", lambda one: one.contender),
        Field("tok/s", lambda one: one.tokens_per_second, ".1f"),
        Field("x mlx-lm", lambda one: one.tokens_per_second / plain, ".2f"),
        Field("x its spec", lambda one: spec and one.tokens_per_second / spec, ".2f"),
        Field("tok/round", lambda one: one.tokens_per_round, ".2f"),
        Field("target", lambda one: one.target_busy, ".0%"),
        Field("draft", lambda one: one.draft_busy, ".0%"),
    ]
    acceptance = scenario.acceptance
    note = (
        f"Modelled: best guess right {acceptance.accept:.0%}, exponent {acceptance.exponent:g}, spread "
        f"{acceptance.spread:g}."
    )
    table = tabulated(f"temperature {scenario.temperature:g}", fields, predictions, note=note)
    return msgspec.structs.replace(table, origin="computed")


def _worth_table(scenario: Scenario, rows: Sequence[Worth]) -> Table:
    fields: list[Field[Worth]] = [
        Field("best guess right", lambda row: row.accept, ".0%"),
        Field("in turns, K", lambda row: row.baseline and row.baseline.tokens_per_second, ".1f"),
        Field("best K", lambda row: row.baseline and row.baseline.contender.rpartition(" ")[2]),
        Field("adaptive, in turns", lambda row: row.in_turns.tokens_per_second, ".1f"),
        Field("at once", lambda row: row.at_once.tokens_per_second, ".1f"),
        Field("x best in turns", lambda row: row.at_once.tokens_per_second / _best_in_turns(row), ".2f"),
        Field("no draft time", lambda row: row.bound.tokens_per_second, ".1f"),
    ]
    table = tabulated(f"temperature {scenario.temperature:g}, drafts of other acceptances", fields, rows, note=_WORTH)
    return msgspec.structs.replace(table, origin="computed")


def _best_in_turns(row: Worth) -> float:
    return max(each.tokens_per_second for each in (row.baseline, row.in_turns) if each is not None)
