"""Requests with known answers, and what a client receives of them: tokens and arrival times."""

import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise

from orchestrator.api.client import Client
from orchestrator.api.pipeline import Pipeline
from orchestrator.api.sampling import UNFILTERED, SamplingParams
from protocol.errors import PipelineError

_PROMPTS = (
    ("def quicksort(items):", 0.0),
    ("import os\n\n\ndef walk(", 0.7),
    ("class Stack:\n    def __init__(self):", 1.0),
    ("def quicksort(items):", 1.0),
)
"""Prompts and temperatures."""
_TOKENS = 120


@dataclass(frozen=True, slots=True)
class DrillRequest:
    """A request and its only correct answer."""

    prompt: str
    params: SamplingParams
    answer: tuple[int, ...]


@dataclass(slots=True)
class ServedRequest:
    """What a client received of one request. Times are those of time.monotonic()."""

    arrivals: list[float] = field(default_factory=list)
    """Arrival time of each piece of text."""
    tokens: tuple[int, ...] = ()
    error: PipelineError | None = None

    @property
    def seconds(self) -> float:
        """From the first piece to the last."""
        return self.arrivals[-1] - self.arrivals[0] if self.arrivals else 0.0

    def gaps(self, since: float = 0.0) -> list[float]:
        """Seconds between pieces, for gaps that end after the time `since`."""
        return [later - earlier for earlier, later in pairwise(self.arrivals) if later > since]

    def longest_gap(self, since: float = 0.0) -> float | None:
        """The longest gap that ends after `since`; None if there is none."""
        return max(self.gaps(since), default=None)


@cache
def drill_requests(seed: int) -> list[DrillRequest]:
    """The requests of a drill, with answers by target-only decoding."""
    source = random.Random(seed)
    sampled = [
        (
            prompt,
            SamplingParams(temperature=temperature, **UNFILTERED, seed=source.randrange(1 << 30), max_tokens=_TOKENS),
        )
        for prompt, temperature in _PROMPTS
    ]
    with Pipeline(strategy="ar") as pipeline:
        return [DrillRequest(prompt, params, pipeline.generate(prompt, params).tokens) for prompt, params in sampled]


def serve(client: Client, request: DrillRequest) -> ServedRequest:
    """Send a request and receive all of it. A failure is part of the result and not raised."""
    served = ServedRequest()
    try:
        with client.stream(request.prompt, request.params) as stream:
            for _ in stream:
                served.arrivals.append(time.monotonic())
            if stream.result is not None:
                served.tokens = stream.result.tokens
    except PipelineError as error:
        served.error = error
    return served


def wrong(request: DrillRequest, served: ServedRequest, when: str) -> list[str]:
    """A sentence if a request failed or got wrong tokens."""
    if served.error is not None:
        return [f"{when}: the request failed ({served.error})"]
    if served.tokens != request.answer:
        same = next(
            (i for i, (a, b) in enumerate(zip(served.tokens, request.answer, strict=False)) if a != b),
            min(len(served.tokens), len(request.answer)),
        )
        return [f"{when}: wrong tokens from position {same} on; {len(served.tokens)} of {len(request.answer)} tokens."]
    return []


class DelayedFault:
    """Runs `action` after `delay` seconds, on a thread of its own."""

    def __init__(self, delay: float, action: Callable[[], None]) -> None:
        self.at: float | None = None
        """Time at which the action had ended; None before."""
        self._action = action
        self._timer = threading.Timer(delay, self._run)
        self._timer.start()

    def _run(self) -> None:
        self._action()
        self.at = time.monotonic()

    def done(self) -> float:
        """Wait until the action has ended; returns that time."""
        self._timer.join()
        assert self.at is not None
        return self.at


def added(gaps: Iterable[float | None], undisturbed: float) -> list[float]:
    """The time by which each gap exceeds the longest gap without a fault."""
    return [max(0.0, gap - undisturbed) for gap in gaps if gap is not None]


def median_gap(requests: Sequence[ServedRequest]) -> float:
    """The median gap between pieces, about one step of the target."""
    gaps = sorted(gap for request in requests for gap in request.gaps())
    return gaps[len(gaps) // 2] if gaps else 0.0
