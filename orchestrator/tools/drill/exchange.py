"""Requests as a client lives them: which tokens came, and when. Every answer is known beforehand."""

import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise

from orchestrator.api.client import Client
from orchestrator.api.pipeline import Pipeline
from orchestrator.api.sampling_params import SamplingParams
from protocol.errors import PipelineError

_ASKED = (
    ("def quicksort(items):", 0.0),
    ("import os\n\n\ndef walk(", 0.7),
    ("class Stack:\n    def __init__(self):", 1.0),
    ("def quicksort(items):", 1.0),
)
"""Prompts and temperatures."""
_TOKENS = 120


@dataclass(frozen=True, slots=True)
class DrillRequest:
    """A request and its one right answer."""

    prompt: str
    params: SamplingParams
    answer: tuple[int, ...]


@dataclass(slots=True)
class Exchange:
    """What a client saw of one request. Times are those of time.monotonic()."""

    began: float
    arrivals: list[float] = field(default_factory=list)
    """When each piece of text came."""
    tokens: tuple[int, ...] = ()
    error: PipelineError | None = None

    @property
    def seconds(self) -> float:
        """From the first piece to the last."""
        return self.arrivals[-1] - self.arrivals[0] if self.arrivals else 0.0

    def gaps(self, since: float = 0.0) -> list[float]:
        """Seconds between pieces, for gaps that end after the moment `since`."""
        return [later - earlier for earlier, later in pairwise(self.arrivals) if later > since]

    def stall(self, since: float = 0.0) -> float | None:
        """The longest gap that ends after `since`; None if there is none."""
        return max(self.gaps(since), default=None)


@cache
def questions(seed: int) -> list[DrillRequest]:
    """What is asked, with answers by target-only decoding."""
    source = random.Random(seed)  # noqa: S311 - no secret
    asked = [
        (prompt, SamplingParams(temperature=temperature, seed=source.randrange(1 << 30), max_tokens=_TOKENS))
        for prompt, temperature in _ASKED
    ]
    with Pipeline(strategy="ar") as pipeline:
        return [DrillRequest(prompt, params, pipeline.generate(prompt, params).tokens) for prompt, params in asked]


def ask(client: Client, question: DrillRequest, on_piece: Callable[[], None] = lambda: None) -> Exchange:
    """Live through one request. A failure is part of what comes out, not raised."""
    exchange = Exchange(time.monotonic())
    try:
        with client.stream(question.prompt, question.params) as stream:
            for _ in stream:
                exchange.arrivals.append(time.monotonic())
                on_piece()
            if stream.result is not None:
                exchange.tokens = stream.result.tokens
    except PipelineError as error:
        exchange.error = error
    return exchange


def wrong(question: DrillRequest, exchange: Exchange, when: str) -> list[str]:
    """A sentence if a request failed or got other tokens than it should have."""
    if exchange.error is not None:
        return [f"{when}: the request failed ({exchange.error})"]
    if exchange.tokens != question.answer:
        same = next(
            (i for i, (a, b) in enumerate(zip(exchange.tokens, question.answer, strict=False)) if a != b),
            min(len(exchange.tokens), len(question.answer)),
        )
        return [f"{when}: wrong tokens from position {same} on, {len(exchange.tokens)} of {len(question.answer)}."]
    return []


class Shot:
    """Does something to a running request `delay` seconds after it is made, on a thread of its own."""

    def __init__(self, delay: float, action: Callable[[], None]) -> None:
        self.at: float | None = None
        """When it had been done."""
        self._action = action
        self._timer = threading.Timer(delay, self._fire)
        self._timer.start()

    def _fire(self) -> None:
        self._action()
        self.at = time.monotonic()

    def done(self) -> float:
        """Wait until it was done; says when."""
        self._timer.join()
        assert self.at is not None
        return self.at


def added(stalls: Iterable[float | None], undisturbed: float) -> list[float]:
    """How much longer than the longest gap without a fault each stall was."""
    return [max(0.0, stall - undisturbed) for stall in stalls if stall is not None]


def typical_step(exchanges: Sequence[Exchange]) -> float:
    """The median gap between pieces: about one step of the target."""
    gaps = sorted(gap for exchange in exchanges for gap in exchange.gaps())
    return gaps[len(gaps) // 2] if gaps else 0.0
