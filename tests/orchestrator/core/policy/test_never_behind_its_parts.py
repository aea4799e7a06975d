"""`adaptive` holds plain decoding, prompt lookup, chains and trees, and is not behind any of them (virtual time)."""

import random
from dataclasses import dataclass, field, replace
from itertools import product

import pytest

from orchestrator.core.options import Options, PlacementChoice
from orchestrator.lab.simulate.acceptance import AcceptanceModel, ModelledLanguage, random_token, uniform
from orchestrator.lab.simulate.devices import Devices
from orchestrator.lab.simulate.workers import modelled_workers
from orchestrator.machine.profiles.device_profiles import load_profile
from protocol.worker.pacing import DevicePace
from tests.support.simulation import Simulation

_INSIDE, _SPREAD = 0.85, 1.5
_TOKENS, _REQUESTS = 400, 3


@dataclass(frozen=True)
class RepetitiveText(ModelledLanguage):
    """A share of the text copies earlier places, in runs of random lengths with this mean. The draft is right there in
    at least 0.85, and less often elsewhere."""

    share: float = 0.0
    run: int = 1
    inside: list[float] = field(default_factory=list)
    texts: dict[int, tuple[list[int], list[bool]]] = field(default_factory=dict)

    @classmethod
    def of(cls, accept: float, share: float, run: int) -> "RepetitiveText":
        inside = max(accept, _INSIDE)
        outside = max(0.02, (accept - share * inside) / (1 - share))
        about = AcceptanceModel(accept=inside, spread=_SPREAD).by_difficulty()
        return cls(AcceptanceModel(accept=outside, spread=_SPREAD), share=share, run=run, inside=about)

    def prompt(self, request: int) -> tuple[int, ...]:
        return tuple(self._text(request)[0][: self.prompt_tokens])

    def token(self, request: int, position: int) -> int:
        return self._text(request)[0][position]

    def accept_at(self, request: int, position: int) -> float:
        about = self.inside if self._text(request)[1][position] else self._by_difficulty
        return about[int(uniform(self.seed, request, 1, position) * len(about))]

    def _text(self, request: int) -> tuple[list[int], list[bool]]:
        """Its tokens, and which of them are copies."""
        if request not in self.texts:
            rng = random.Random(request)
            begins = self.share / (self.share + self.run * (1 - self.share))
            tokens = [random_token(self.seed, request, place) for place in range(self.prompt_tokens)]
            copied = [False] * len(tokens)
            while len(tokens) < self.prompt_tokens + _TOKENS + 100:
                length = 1
                if rng.random() >= begins:
                    tokens.append(random_token(self.seed, request, len(tokens)))
                    copied.append(False)
                    continue
                while rng.random() >= 1 / self.run:
                    length += 1
                begin = rng.randrange(max(1, len(tokens) - length))
                found = tokens[begin : begin + length]
                tokens += found
                copied += [True] * len(found)
            self.texts[request] = tokens, copied
        return self.texts[request]


def on_one_device(devices: Devices) -> Devices:
    return replace(devices, draft=devices.baseline_draft, slow_down=2.0)


_STEP = DevicePace(
    steps=((1, 0.0043), (2, 0.0045), (4, 0.0048), (8, 0.0052), (16, 0.006)),
    prefill_rate=4000.0,
)
_PROCESSOR = Devices(
    target=DevicePace(steps=((1, 0.02), (2, 0.023), (4, 0.029), (8, 0.04), (16, 0.058)), prefill_rate=800.0),
    draft=_STEP,
    baseline_draft=_STEP,
    slow_down=2.0,
)
_M4, _27B = (Devices.of(load_profile(name)) for name in ("m4-16gb-qwen2.5-3b", "m3-max-qwen3.8-27b"))
_BLOCKS = "M3 Max's GPU, 27B"
PLACES: dict[str, tuple[Devices, PlacementChoice]] = {
    "processor": (_PROCESSOR, "shared"),
    "M4": (_M4, "apart"),
    "M4's GPU": (on_one_device(_M4), "shared"),
    _BLOCKS: (on_one_device(_27B), "shared"),
}
PARTS = {
    "plain": (False, {"strategy": "ar"}),
    "lookup alone": (False, {}),
    "without lookup": (True, {"lookup": "off"}),
    **{f"chain of {tokens}": (True, {"strategy": "sd", "draft_tokens": tokens}) for tokens in (1, 2, 3, 4, 6)},
}


def seconds(text: ModelledLanguage, place: str, draft: bool = True, block: int | None = None, **options) -> float:
    """Of all requests but the first, each with its prompt. `block`: tokens that a forward of the draft guesses, if it
    is another draft than the place's."""
    clients = list(simulated(text, place, draft, block, **options).clients.values())
    assert all(client.tokens == client.reference for client in clients)
    figures = [client.statistics for client in clients[1:] if client.statistics is not None]
    return sum(one.generated_tokens / one.tokens_per_second for one in figures)


def simulated(
    text: ModelledLanguage, place: str, draft: bool = True, block: int | None = None, **options
) -> Simulation:
    devices, placement = PLACES[place]
    devices = replace(devices, block=block or devices.block)
    pipeline = Options(placement=placement, **options)
    simulation = Simulation(pipeline, text, modelled_workers(text, devices), slow_down=devices.slow_down)
    simulation.start("target")
    if draft:
        simulation.start("draft")
    for request in range(_REQUESTS):
        simulation.submit(request, _TOKENS)
        simulation.run()
    return simulation


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("place", "accept", "share", "run"),
    [
        (place, accept, *text)
        for place, accept, text in product(
            PLACES, (0.2, 0.4, 0.6, 0.8, 0.95), ((0.0, 1), (0.3, 2), (0.3, 4), (0.3, 16), (0.6, 8))
        )
    ],
)
def test_adaptive_is_not_behind_its_parts(place: str, accept: float, share: float, run: int):
    text = RepetitiveText.of(accept, share, run)
    best = min(seconds(text, place, draft, **options) for draft, options in PARTS.values())

    assert best / seconds(text, place) >= 0.98


def test_a_repetition_that_has_begun_is_believed_to_go_on():
    simulation = simulated(RepetitiveText.of(0.2, 0.3, 4), "processor", draft=False)
    task = next(iter(simulation.clients.values())).task
    believed = simulation.machine.drafts.estimates(task, 1).lookup

    assert 0.5 < believed(0.5, 0) < 0.7 < believed(0.5, 2)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("accept", [0.4, 0.6, 0.8, 0.926, 0.95])
@pytest.mark.parametrize("place", ["processor", "M4's GPU", _BLOCKS])
def test_a_tree_in_turns_is_not_behind_the_best_chain_of_a_block_drafter(place: str, accept: float):
    text = RepetitiveText.of(accept, 0.0, 1)
    chains = [seconds(text, place, block=8, strategy="sd", draft_tokens=tokens) for tokens in range(1, 9)]

    assert min(chains) / seconds(text, place, block=8) >= 0.99


@pytest.mark.sampled(1)
@pytest.mark.parametrize("accept", [0.4, 0.5, 0.6])
@pytest.mark.parametrize("place", ["processor", "M4's GPU", _BLOCKS])
def test_a_draft_that_underrates_itself_is_asked_for_what_it_brings(place: str, accept: float):
    text = ModelledLanguage(AcceptanceModel(accept=accept, spread=_SPREAD, claim_shift=-1.96))
    parts = [PARTS[name] for name in ("plain", "chain of 1", "chain of 2", "chain of 3")]
    best = min(seconds(text, place, draft, **options) for draft, options in parts)

    assert best / seconds(text, place) >= 0.98
