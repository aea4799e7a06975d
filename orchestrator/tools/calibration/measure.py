"""What forwards and prompts take in real worker processes, alone and both at once. Medians; seconds."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

from orchestrator.tools.calibration.rig import Rig
from orchestrator.tools.calibration.worker_messages import Growing, Questions, Verifying
from protocol.messages.plans import BestFirst
from protocol.messages.worker import Grow, Hello, Prefilled, Stop, Verdict

WIDTHS = (1, 2, 4, 8, 16, 32)
_WARM_UP = 3
"""Forwards of a width before any counts: kernels are compiled in them."""
_TARGET_TOGETHER, _DRAFT_TOGETHER = 8, 8
"""Widths while both are at work."""
_PROMPT_TOKENS = 512

OnCalibrationProgress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Times:
    """One model on one device."""

    prefill_rate: float
    """Tokens a second."""
    steps: dict[int, float]
    """Seconds by width."""


def target_alone(rig: Rig, hello: Hello, samples: int, notice: OnCalibrationProgress) -> Times:
    """`samples` forwards of each width."""
    questions = Questions(hello)
    notice("target, prompts")
    rate = median(_target_rates(rig, questions))
    verifying = _verifying(rig, questions)
    steps: dict[int, float] = {}
    for width in WIDTHS:
        notice(f"target, {width} tokens")
        taken = []
        for _ in range(_WARM_UP + samples):
            if not verifying.has_room(width):
                rig.tell("target", Stop(verifying.start.sequence))
                verifying = _verifying(rig, questions)
            taken.append(_verify(rig, verifying, width))
        steps[width] = median(taken[_WARM_UP:])
    return Times(rate, steps)


def draft_alone(rig: Rig, hello: Hello, samples: int, notice: OnCalibrationProgress) -> Times:
    """`samples` growth steps of each width."""
    questions = Questions(hello)
    notice("draft, prompts")
    rate = median(_draft_rates(rig, questions))
    steps: dict[int, float] = {}
    for width in WIDTHS:
        notice(f"draft, {width} tokens")
        taken: list[float] = []
        growing = Growing(questions, width)
        _begin(rig, growing)
        while len(taken) < _WARM_UP + samples:
            grow = rig.await_(Grow)
            if grow.evaluated == width:
                taken.append(grow.seconds)
            if growing.heard(grow.sequence, len(grow.tokens)):
                _begin(rig, growing)
        _end(rig, growing)
        steps[width] = median(taken[_WARM_UP:])
    return Times(rate, steps)


def slow_down(
    rig: Rig, hellos: tuple[Hello, Hello], alone: tuple[Times, Times], samples: int, notice: OnCalibrationProgress
) -> float:
    """What a forward takes while the other worker is at work too, relative to alone: the larger of the two ratios.

    `hellos` and `alone` are the target's and the draft's. Never below 1.
    """
    notice("both at once")
    together = _together(rig, hellos, samples)
    widths = _TARGET_TOGETHER, _DRAFT_TOGETHER
    ratios = [both / times.steps[width] for both, times, width in zip(together, alone, widths, strict=True)]
    return max(1.0, *ratios)


def _together(rig: Rig, hellos: tuple[Hello, Hello], samples: int) -> tuple[float, float]:
    """Seconds of a verification and of a growth step while both workers never rest."""
    questions = Questions(hellos[0], seed=1)
    verifying = _verifying(rig, questions)
    growing = Growing(Questions(hellos[1], seed=1), _DRAFT_TOGETHER)
    _begin(rig, growing)
    rig.tell("target", verifying.ask(_TARGET_TOGETHER))
    verified: list[float] = []
    grown: list[float] = []
    while min(len(verified), len(grown)) < _WARM_UP + samples:
        match rig.hear():
            case Verdict() as verdict:
                verified.append(verdict.seconds)
                verifying.heard(verdict)
                if not verifying.has_room(_TARGET_TOGETHER):
                    verifying = _verifying(rig, questions)
                rig.tell("target", verifying.ask(_TARGET_TOGETHER))
            case Grow() as grow:
                if grow.evaluated == _DRAFT_TOGETHER:
                    grown.append(grow.seconds)
                if growing.heard(grow.sequence, len(grow.tokens)):
                    _begin(rig, growing)
            case _:
                pass
    return median(verified[_WARM_UP:]), median(grown[_WARM_UP:])


def _verify(rig: Rig, verifying: Verifying, width: int) -> float:
    rig.tell("target", verifying.ask(width))
    verdict = rig.await_(Verdict)
    verifying.heard(verdict)
    return verdict.seconds


def _verifying(rig: Rig, questions: Questions) -> Verifying:
    """A new sequence whose prompt the target has read."""
    verifying = Verifying(questions)
    rig.tell("target", verifying.start)
    rig.await_(Prefilled)
    return verifying


def _target_rates(rig: Rig, questions: Questions) -> Iterator[float]:
    for repeat in range(4):
        start = questions.start(min(_PROMPT_TOKENS, questions.context // 2))
        rig.tell("target", start)
        prefilled = rig.await_(Prefilled)
        rig.tell("target", Stop(start.sequence))
        if repeat:
            yield prefilled.tokens / prefilled.seconds


def _draft_rates(rig: Rig, questions: Questions) -> Iterator[float]:
    """A draft says nothing of its prefill: the time to its first growth less that step's own."""
    for repeat in range(4):
        start = questions.start(min(_PROMPT_TOKENS, questions.context // 2), BestFirst(width=1, fan=2))
        began = time.perf_counter()
        rig.tell("draft", start)
        grow = _first_of(rig, start.sequence)
        seconds = time.perf_counter() - began - grow.seconds
        rig.tell("draft", Stop(start.sequence))
        if repeat:
            yield (len(start.tokens) - 1) / seconds


def _first_of(rig: Rig, sequence: int) -> Grow:
    """An earlier sequence's last growth may still be on its way."""
    while True:
        grow = rig.await_(Grow)
        if grow.sequence == sequence:
            return grow


def _begin(rig: Rig, growing: Growing) -> None:
    for message in growing.begin():
        rig.tell("draft", message)


def _end(rig: Rig, growing: Growing) -> None:
    for message in growing.end():
        rig.tell("draft", message)
