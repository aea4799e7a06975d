"""An hour full of faults, drawn from a seed: requests, bad wires, deaths, silence, garbage; then peace. Pure.

The same seed gives the same hour, event by event.
"""

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from orchestrator.core.events import Request
from orchestrator.core.options import Options
from orchestrator.core.policy.strategies import STRATEGIES
from orchestrator.tools.simulate.acceptance import AcceptanceModel, InventedLanguage
from orchestrator.tools.simulate.devices import Wire
from orchestrator.tools.simulate.draft import ModelledDraft
from orchestrator.tools.simulate.faults.faulty_workers import GarbageDraft, ModelledPrefill, Responsive, WaywardTarget
from orchestrator.tools.simulate.faults.invariants import Violation
from orchestrator.tools.simulate.faults.world import FaultSimulation
from orchestrator.tools.simulate.language import made_up
from orchestrator.tools.simulate.modelled_worker import ModelledWorker
from orchestrator.tools.simulate.target import ModelledTarget
from protocol.messages.base import Role
from protocol.messages.sampling import Sampling
from protocol.worker.pacing import DevicePace

STORM = 300.0
"""Seconds from one storm's beginning to the next one's."""
_LONGEST = 60.0
"""Seconds of a storm."""
PEACE = 200.0
"""Seconds in which every request must end once faults have: a silent target is found out after 60."""
_MOST_GUESTS = 3
_CONTEXT = 1 << 12
_TARGET = DevicePace(steps=((1, 0.020), (4, 0.024), (16, 0.040)), prefill_rate=1000.0)
_DRAFTS = [DevicePace(steps=((1, step), (8, 1.2 * step)), prefill_rate=2000.0) for step in (0.012, 0.03, 0.15)]


@dataclass(slots=True)
class Hour:
    """What became of one seed."""

    seed: int
    counts: Counter[str] = field(default_factory=Counter)
    violation: str = ""
    """What was broken; empty if nothing was."""
    last: list[str] = field(default_factory=list)
    """The events before it with what they led to."""


class RepeatingLanguage(InventedLanguage):
    """Every other passage repeats itself, so that prompt lookup finds something."""

    def token(self, request: int, position: int) -> int:
        repeats = (position // 24) % 2 == 1
        return made_up(self.seed, request, 0, 1 << 20 if repeats else position, position % 5 if repeats else 0)


def live(seed: int, hours: float = 1.0) -> Hour:
    """One hour, or as many as wanted, and whether all promises were kept."""
    hour = Hour(seed)
    story = _Story(seed)
    try:
        for number in range(max(1, round(hours * 3600 / STORM))):
            story.storm(number * STORM)
    except Exception as error:  # noqa: BLE001 - whatever breaks the state machine is a finding
        hour.violation = str(error) if isinstance(error, Violation) else f"{type(error).__name__}: {error}"
        hour.last = [_line(at, event, commands) for at, event, commands in story.world.last]
    hour.counts = story.world.counts
    return hour


class _Story:
    """Draws what happens."""

    def __init__(self, seed: int) -> None:
        self._source = source = random.Random(f"hour {seed}")  # noqa: S311 - nothing secret
        accept = source.choice((0.0, 0.3, 0.7, 0.95))
        shift = source.choice((0.0, 0.0, 20.0, -3.0))
        prompt = source.choice((2, 10, 60))
        self._language = RepeatingLanguage(AcceptanceModel(accept=accept, claim_shift=shift), seed & 0xFFFF, prompt)
        self._requests = 0
        self._garbage = 0.0
        """Share of messages that drafts spoil at present."""
        self._wayward = 0.0
        self.world = FaultSimulation(self._options(), self._worker, source, loading=source.choice((0.0, 1.0, 5.0)))

    def storm(self, begin: float) -> None:
        """Faults and requests for up to a minute, then peace, in which all must end and be forgotten."""
        world, source = self.world, self._source
        world.run(begin)
        if world.failed or world.given_up():
            world.begin()
        length = source.uniform(1.0, _LONGEST)
        self._garbage = source.choice((0.0, 0.0, 0.1, 0.9))
        self._wayward = source.choice((0.0, 0.01, 0.1))
        world.rewire(self._bad_wire())
        for at in self._times(begin, length, source.choice((1, 2, 6))):
            world.agenda.at(at, self._ask)
        for at in self._times(begin, length, source.choice((0, 1, 3, 8))):
            world.agenda.at(at, self._fault)
        world.run(begin + length)
        self._garbage = self._wayward = 0.0
        world.rewire(Wire())
        world.run(begin + length + PEACE)
        if not world.failed:
            world.check_empty()

    def _times(self, begin: float, length: float, count: int) -> Iterable[float]:
        """Some close together, some far apart."""
        burst = begin + self._source.uniform(0.0, length)
        for _ in range(count):
            near = self._source.random() < 0.5
            at = burst + self._source.uniform(0.0, 1.0) if near else begin + self._source.uniform(0.0, length)
            yield min(at, begin + length)

    def _ask(self) -> None:
        source, self._requests = self._source, self._requests + 1
        number, most = self._requests, source.choice((1, 3, 10, 30))
        first = len(self._language.prompt(number))
        reference = [self._language.token(number, first + index) for index in range(most)]
        ends = frozenset[int]()
        if source.random() < 0.3:
            ends = frozenset({source.choice(reference), 1})
            reference = reference[: 1 + min(index for index, token in enumerate(reference) if token in ends)]
        sampling = Sampling(temperature=source.choice((0.0, 1.0)), seed=number)
        id = self.world.submit(Request(self._language.prompt(number), sampling, most, ends), reference)
        if id is not None and source.random() < 0.2:
            self.world.agenda.at(self.world.now + source.expovariate(2.0), lambda: self.world.cancel(id))

    def _fault(self) -> None:
        source, world = self._source, self.world
        role: Role = source.choice(("target", "draft", "draft", "prefill"))
        own, guest = world.own(role), source.choice(world.guests or [0])
        match source.choice(("kill", "kill", "freeze", "wire", "orchestrator", "attach", "detach")):
            case "kill":
                world.kill(role)
            case "freeze" if own is not None:
                world.freeze(guest if role == "draft" and guest else own, source.choice((0.05, 1.0, 10.0, 90.0)))
            case "wire":
                world.rewire(self._bad_wire())
            case "attach" if len(world.guests) < _MOST_GUESTS:
                world.attach()
            case "detach":
                world.detach(guest)
            case _ if source.random() < 0.2:
                world.begin()
            case _:
                pass

    def _bad_wire(self) -> Wire:
        source = self._source
        return Wire(
            delay=source.choice((0.0001, 0.0001, 0.005, 0.05)),
            jitter=source.choice((0.0, 0.001, 0.1)),
            loss=source.choice((0.0, 0.01, 0.1)),
            resend=source.choice((0.2, None)),
            doubled=source.choice((0.0, 0.05)),
            overtaking=source.choice((0.0, 0.05)),
        )

    def _options(self) -> Options:
        source = self._source
        strategies = [*STRATEGIES, "adaptive", "adaptive", "adaptive"]
        return Options(
            strategy=source.choice(strategies),
            fallback=source.choice(("neural", "fast", "adaptive")),
            draft_tokens=source.choice((1, 4)),
            draft_width=source.choice((1, 4)),
            draft_fan=source.choice((1, 3)),
            fan_budget=source.choice((2, 6)),
            prefill=source.choice(("auto", "always")),
            arena_memory=source.choice((0, 64, 2048)),
            concurrent=source.choice((1, 2, 16)),
            turn=source.choice((8, 256)),
        )

    def _worker(self, role: Role) -> ModelledWorker:
        if role == "target":
            target = ModelledTarget(self._language, _TARGET, _CONTEXT)
            return WaywardTarget(target, self._source, self._wayward)
        if role == "prefill":
            return Responsive(ModelledPrefill(self._source, _CONTEXT))
        draft = ModelledDraft(self._language, self._source.choice(_DRAFTS), _CONTEXT)
        if self._garbage and self._source.random() < 0.7:
            return GarbageDraft(draft, self._source, self._garbage)
        return Responsive(draft)


def _line(at: float, event: object, commands: Iterable[object]) -> str:
    told = "; ".join(_brief(command) for command in commands) or "nothing"
    return f"{at:.4f} s  {_brief(event)}\n    -> {told}"


def _brief(thing: object) -> str:
    text = repr(thing)
    return text if len(text) <= 240 else f"{text[:200]} ... {text[-40:]}"
