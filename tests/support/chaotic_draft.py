"""A faulty draft process: `python -m tests.support.chaotic_draft MODE SETUP`. Knows no target.

Its guesses are random, wrong, invalid, late, too many, or no messages at all; those of `Disorder` are honest and lose
their order.
"""

import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import zmq

from draft_worker.engines.mlx import MlxEngine
from draft_worker.worker import DraftWorker
from protocol.messages.base import NodeId, RequestId
from protocol.messages.worker import Fault, FromWorker, Grow, Hello, Reroot, Start, Stop, ToWorker, Verdict
from protocol.speculation.prompt_lookup import PromptLookup
from protocol.speculation.token_tree import node_id
from protocol.transport import Link, Stamp, connected_dealer
from protocol.worker.interface import Worker, WorkerReply
from protocol.worker.process import WorkerSetup, serve

VOCABULARY = 4096
_DEPTH = 5
Guess = Callable[[random.Random, int], tuple[tuple[int, float], ...]]
"""From the last token to candidates with claimed probabilities, best first."""


def at_random(source: random.Random, _: int) -> tuple[tuple[int, float], ...]:
    return (source.randrange(VOCABULARY), source.uniform(0.5, 1.0)), (source.randrange(VOCABULARY), 0.1)


def surely_wrong(_: random.Random, last: int) -> tuple[tuple[int, float], ...]:
    """Meaningless tokens, claimed with near certainty."""
    return (((last * 7 + 2011) % VOCABULARY, 0.99),)


def beyond_the_vocabulary(source: random.Random, _: int) -> tuple[tuple[int, float], ...]:
    return (VOCABULARY + source.randrange(1 << 20), 0.9), (source.randrange(VOCABULARY), 0.05)


class Guesser:
    """Grows a few levels below every root, by a rule without a model."""

    def __init__(self, guess: Guess, follows: int = 0) -> None:
        """`follows`: the candidate that it continues. Any but the first leaves the main chain short."""
        self._guess = guess
        self._follows = follows
        self._source = random.Random(1)
        self._roots: dict[RequestId, tuple[int, NodeId, int]] = {}
        """Round, id and token of each sequence's root."""
        self._due: list[RequestId] = []

    def hello(self) -> Hello:
        return Hello("draft", "faulty", "faulty", "none", VOCABULARY, 1 << 20, "", "none", os.getpid())

    def handle(self, message: ToWorker) -> Iterator[FromWorker]:
        match message:
            case Start() | Reroot():
                self._roots[message.request] = (message.round, message.root, message.tokens[-1])
                self._due.append(message.request)
            case Stop(sequence):
                self._roots.pop(sequence, None)
                self._due = [due for due in self._due if due != sequence]
        yield from ()

    @property
    def has_work(self) -> bool:
        return bool(self._due)

    def work(self) -> Iterator[FromWorker]:
        yield self._growth(self._due.pop(0), _DEPTH)

    def _growth(self, sequence: RequestId, depth: int) -> Grow:
        round, id, token = self._roots[sequence]
        parents, tokens, claims = [], [], []
        for _ in range(depth):
            guesses = self._guess(self._source, token)
            for proposed, claim in guesses:
                parents.append(id)
                tokens.append(proposed)
                claims.append(claim)
            token = guesses[self._follows % len(guesses)][0]
            id = node_id(id, token)
        return Grow(sequence, round, tuple(parents), tuple(tokens), tuple(claims), depth, 0.001)


class Slow(Guesser):
    def work(self) -> Iterator[FromWorker]:
        time.sleep(0.1)
        yield from super().work()


class Silent(Guesser):
    @property
    def has_work(self) -> bool:
        return False


class Crashing(Guesser):
    """Exits in the middle of its fifth step."""

    steps = 0

    def work(self) -> Iterator[FromWorker]:
        self.steps += 1
        if self.steps == 5:
            os._exit(3)
        yield from super().work()


class Flood(Guesser):
    """Is never idle, and sends hundreds of nodes at a time."""

    @property
    def has_work(self) -> bool:
        return bool(self._roots)

    def work(self) -> Iterator[FromWorker]:
        self._due = []
        yield self._growth(next(iter(self._roots)), 100)


class Forger(Guesser):
    """Adds to its growth: random bytes, multipart messages, stamps of other workers, messages of a target."""

    def __init__(self, setup: WorkerSetup) -> None:
        super().__init__(at_random)
        context = zmq.Context[Any].instance()
        self._raw = connected_dealer(context, setup.address)
        self._other_life = Link(context, setup.address, Stamp(setup.epoch + 1, setup.incarnation), ToWorker)

    def work(self) -> Iterator[FromWorker]:
        sequence = self._due[0]
        round, root, token = self._roots[sequence]
        self._raw.send(self._source.randbytes(self._source.randrange(200)))
        self._raw.send_multipart([b"several", b"frames"])
        self._other_life.send(Verdict(sequence, round, (), 1, 0.001))
        yield Verdict(sequence, round, (), 2, 0.001)
        yield Grow(RequestId(999), round, (root,), (token,), (1.0,), 1, 1e6)
        yield Grow(sequence, round, (NodeId(5),), (token,), (0.0,), 1 << 40, 1e6)
        yield from super().work()
        if self._source.random() < 0.2:
            yield Fault("lost", "Not again.", sequence)


class Deceptive(Guesser):
    """Guesses by prompt lookup until the pipeline relies on it; then it claims wrong tokens with certainty."""

    _CORRECT_STEPS = 12

    def __init__(self) -> None:
        super().__init__(lambda source, last: self._guessed(source, last))
        self._lookup = PromptLookup()
        self._steps = 0

    def handle(self, message: ToWorker) -> Iterator[FromWorker]:
        if isinstance(message, Start | Reroot):
            self._lookup.extend(message.tokens)
        yield from super().handle(message)

    def work(self) -> Iterator[FromWorker]:
        self._steps += 1
        yield from super().work()

    def _guessed(self, source: random.Random, last: int) -> tuple[tuple[int, float], ...]:
        known = self._lookup.continuations((last,), 2) if self._steps <= self._CORRECT_STEPS else []
        return tuple(known) or surely_wrong(source, last)


class Disorder:
    """An honest draft whose messages are delayed, doubled and sent in another order."""

    def __init__(self, setup: WorkerSetup) -> None:
        self._draft = DraftWorker(MlxEngine.load(Path(setup.model)), time.perf_counter)
        self._source = random.Random(2)
        self._held: list[WorkerReply] = []

    def hello(self) -> Hello:
        return self._draft.hello()

    def handle(self, message: ToWorker) -> Iterator[WorkerReply]:
        self._held += self._draft.handle(message)
        yield from ()

    @property
    def has_work(self) -> bool:
        return self._draft.has_work or bool(self._held)

    def work(self) -> Iterator[WorkerReply]:
        self._held += self._draft.work()
        self._source.shuffle(self._held)
        for message in self._held[: self._source.randrange(len(self._held) + 1)]:
            yield message
            if self._source.random() < 0.5:
                self._held.remove(message)


MODES: dict[str, Callable[[WorkerSetup], Worker]] = {
    "random": lambda _: Guesser(at_random),
    "short": lambda _: Guesser(at_random, follows=1),
    "surely wrong": lambda _: Guesser(surely_wrong),
    "beyond the vocabulary": lambda _: Guesser(beyond_the_vocabulary),
    "deceptive": lambda _: Deceptive(),
    "slow": lambda _: Slow(at_random),
    "silent": lambda _: Silent(at_random),
    "crashing": lambda _: Crashing(at_random),
    "flood": lambda _: Flood(at_random, follows=1),
    "forger": Forger,
    "disorder": Disorder,
}


def main() -> int:
    setup = WorkerSetup.from_arguments()
    return serve(setup, lambda: MODES[sys.argv[1]](setup))


if __name__ == "__main__":
    sys.exit(main())
