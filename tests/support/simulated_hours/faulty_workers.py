"""Modelled workers with faults: well-typed garbage, refusals, unusable arenas. Pure."""

import random
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from orchestrator.lab.simulate.acceptance import VOCABULARY
from orchestrator.lab.simulate.worker_host import SimulatedWorker, Work
from orchestrator.lab.simulate.workers import modelled_hello
from protocol.messages.base import NodeId, RequestId
from protocol.messages.kv import KvOffer, KvReference
from protocol.messages.worker import (
    Fault,
    Forest,
    FromWorker,
    Grow,
    Ping,
    Pong,
    Prefill,
    Prefilled,
    Start,
    Stop,
    ToWorker,
    Verdict,
    Verify,
)
from protocol.worker.pacing import DevicePace

ARENA_BYTES = 1 << 24
_MAX_KNOWN = 64


class FaultyTarget:
    """A target with correct verdicts that loses sequences, refuses trees and can't adopt some arenas."""

    def __init__(self, inner: SimulatedWorker, source: random.Random, share: float) -> None:
        """`share`: share of messages that are answered with a fault."""
        self.hello = inner.hello
        self._inner = inner
        self._source = source
        self._share = share
        self._unusable: set[RequestId] = set()
        """Sequences whose arena can't be used."""
        self._answered: set[tuple[RequestId, int]] = set()
        """Rounds with a verdict: a repeated Verify gets the same verdict."""

    def handle(self, message: ToWorker) -> Work:
        match message:
            case Verify():
                return self._verify((message,))
            case Forest(trees):
                return self._verify(trees)
            case Start(adopt=KvReference()) if self._source.random() < 0.5:
                self._unusable.add(message.request)
                message = replace(message, adopt=None)
            case _:
                pass
        return self._with_kv(self._inner.handle(message))

    def _verify(self, trees: Sequence[Verify]) -> Work:
        """The faults are sent first, as by a real target."""
        faults = [(verify, self._fault(verify)) for verify in trees]
        good = [verify for verify, fault in faults if fault is None]
        refused = tuple(fault for _, fault in faults if fault is not None)
        if not good:
            return Work(refused)
        work = self._with_kv(self._inner.handle(good[0] if len(good) == 1 else Forest(tuple(good))))
        return work._replace(replies=(*refused, *work.replies))

    def _fault(self, verify: Verify) -> Fault | None:
        if (verify.request, verify.round) in self._answered:
            return None
        if len(verify.tokens) > 1 and self._is_unusual():
            return Fault("refused", "This tree is not valid.", verify.request, len(verify.tokens) - 1)
        return Fault("lost", "Out of memory.", verify.request) if self._is_unusual() else None

    def work(self) -> Work | None:
        work = self._inner.work()
        return None if work is None else self._with_kv(work)

    def _is_unusual(self) -> bool:
        return self._source.random() < self._share

    def _with_kv(self, work: Work) -> Work:
        return work._replace(replies=tuple(reply for one in work.replies for reply in self._replies(one)))

    def _replies(self, reply: FromWorker) -> Iterator[FromWorker]:
        if isinstance(reply, Prefilled) and reply.request in self._unusable:
            self._unusable.remove(reply.request)
            yield replace(reply, warning="The arena is unusable.")
            return
        yield reply
        if isinstance(reply, Verdict):
            self._answered.add((reply.request, reply.round))
        if isinstance(reply, Verdict) and self._is_unusual():
            yield KvOffer(reply.request, arena_name(self._source), self._source.randrange(1, 80), ARENA_BYTES, 0.001)


class ModelledPrefill:
    """Prefills prompts for the target, each in an arena of its own."""

    def __init__(self, pace: DevicePace, source: random.Random, share: float) -> None:
        """`share`: share of prompts that are refused."""
        self.hello = modelled_hello("prefill")
        self.pace = pace
        self.share = share
        self._source = source

    def handle(self, message: ToWorker) -> Work:
        if isinstance(message, Ping):
            return Work((Pong(message.sent),))
        if not isinstance(message, Prefill):
            return Work()
        if self._source.random() < self.share:
            return Work((Fault("refused", "Too long.", message.request),))
        seconds = self.pace.prefill(len(message.tokens))
        offer = KvOffer(message.request, arena_name(self._source), len(message.tokens), ARENA_BYTES, seconds)
        return Work((offer,), seconds)

    def work(self) -> Work | None:
        return None


class GarbageDraft:
    """Damages the messages of a modelled draft, and adds messages that only other workers may send."""

    def __init__(self, inner: SimulatedWorker, source: random.Random, share: float) -> None:
        """`share`: share of messages that are damaged."""
        self.hello = inner.hello
        self._inner = inner
        self._source = source
        self._share = share
        self._sequences: list[RequestId] = [RequestId(0)]
        self._nodes: list[NodeId] = [NodeId(0)]

    def handle(self, message: ToWorker) -> Work:
        if isinstance(message, Start):
            self._sequences = [*self._sequences[-_MAX_KNOWN:], message.request]
            self._nodes = [*self._nodes[-_MAX_KNOWN:], message.root]
        if isinstance(message, Stop) and self._source.random() < self._share:
            return Work((self._unexpected_message(message.request),))
        return self._damaged(self._inner.handle(message))

    def work(self) -> Work | None:
        work = self._inner.work()
        return None if work is None else self._damaged(work)

    def _damaged(self, work: Work) -> Work:
        replies: list[FromWorker] = []
        for reply in work.replies:
            if isinstance(reply, Grow):
                self._nodes = [*self._nodes[-_MAX_KNOWN:], *reply.parents]
            if self._source.random() < self._share:
                replies.append(self._wrong(reply) if isinstance(reply, Grow) else reply)
                replies.append(self._unexpected_message(self._source.choice(self._sequences)))
            else:
                replies.append(reply)
        return work._replace(replies=tuple(replies))

    def _wrong(self, grow: Grow) -> Grow:
        """The message with one to three wrong fields."""
        source, count = self._source, len(grow.tokens)
        changes = (
            {"parents": tuple(source.choice(self._nodes) for _ in range(count))},
            {"tokens": tuple(source.randrange(2 * VOCABULARY - 1) for _ in range(count))},
            {"probabilities": tuple(source.choice((0.0, 1e-300, 0.5, 1.0)) for _ in range(count))},
            {"round": source.choice((0, grow.round + 1, 1 << 50))},
            {"request": source.choice(self._sequences)},
            {"seconds": source.choice((0.0, 1e6)), "evaluated": source.choice((0, 1 << 40))},
            {"parents": grow.parents[::-1], "tokens": grow.tokens[::-1]},
        )
        for change in source.sample(changes, source.randrange(1, 4)):
            grow = replace(grow, **change)
        return grow

    def _unexpected_message(self, sequence: RequestId) -> FromWorker:
        """A message that a correct draft would not send now."""
        source = self._source
        return source.choice(
            (
                Fault("lost", "Not again.", sequence),
                Fault("refused", "No.", sequence),
                Fault("lost", "Nothing in particular."),
                Verdict(sequence, source.randrange(9), (), source.randrange(VOCABULARY), 0.001),
                Prefilled(sequence, source.randrange(9), 1, 0.001, 1, source.choice(("", "No such arena."))),
                KvOffer(sequence, arena_name(source), source.randrange(1, 99), ARENA_BYTES, 0.001),
                Pong(-1.0),
                Grow(sequence, 0, (), (), (), 0, 0.0),
            )
        )


def arena_name(source: random.Random) -> str:
    """A name that no other arena has."""
    return f"lp-{source.getrandbits(80):020x}"
