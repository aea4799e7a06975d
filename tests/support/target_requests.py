"""A target worker of a tiny model, and the orchestrator's end of its requests: valid rounds, and the tokens that they
commit."""

import random
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any, TypeAlias

from protocol.inference.language_model import LanguageModel
from protocol.kv.exchange import KvExchange
from protocol.messages.base import NodeId, RequestId
from protocol.messages.kv import KvOffer
from protocol.messages.sampling import Sampling
from protocol.messages.worker import Fault, FromWorker, Hello, Prefilled, Prefilling, Start, ToWorker, Verdict, Verify
from protocol.speculation.token_tree import node_id
from target_worker.engine import TargetEngine
from target_worker.worker import TargetWorker
from tests.support.models.tiny_models import VOCABULARY, tree_model

ROOT = NodeId(1234)
HELLO = Hello("target", "mlx", "tiny", "llama", VOCABULARY, 512, "none", "cpu", 1)
PROMPT: tuple[int, ...] = (5, 9, 2, 33, 41, 7, 5, 9)
LONG_PROMPT = tuple(random.Random(1).choices(range(VOCABULARY), k=90))
GREEDY, HOT = Sampling(), Sampling(temperature=1.0, seed=3)
Tree: TypeAlias = tuple[Sequence[int], Sequence[int]]
"""Tokens below the root and their parents' entries (0 is the root)."""


def target(
    model: LanguageModel | None = None, chunk: int = 64, exchange: KvExchange | None = None, **settings: Any
) -> TargetWorker:
    """Its clock advances by a second at each question."""
    ticks = count()
    engine = TargetEngine(model or tree_model(), chunk, exchange)
    return TargetWorker(engine, lambda: float(next(ticks)), HELLO, **settings)


def start(
    tokens: Sequence[int] = PROMPT, sampling: Sampling = GREEDY, request: int = 1, round: int = 0, **others: Any
) -> Start:
    return Start(RequestId(request), round, tuple(tokens), ROOT, sampling, **others)


def wrong_at_last(coming: Sequence[int]) -> Tree:
    """A chain of these tokens, but for the last."""
    tokens = [*coming[:-1], *((token + 1) % VOCABULARY for token in coming[-1:])]
    return tokens, range(len(tokens))


def fault(replies: Sequence[Any]) -> tuple[str, int | None]:
    """Kind and request of the only reply."""
    (found,) = replies
    assert isinstance(found, Fault)
    return found.kind, found.request


def answers(worker: Any, message: ToWorker) -> list[Any]:
    """All replies to a message and of the work that follows, but for how far a prompt has been read."""
    replies = list(worker.handle(message))
    while worker.has_work:
        replies += worker.work()
    return [reply for reply in replies if not isinstance(reply, Prefilling)]


class Request:
    """Sends a Start, and then round by round a Verify of the tokens below the root and their parents' entries (0 is the
    root)."""

    def __init__(self, worker: Any, start: Start) -> None:
        self.worker = worker
        self.sequence, self.round, self.root = start.request, start.round, start.root
        self.prompt, self.tokens, self.ends = start.tokens, list(start.tokens), start.eos_tokens
        self.offers: list[KvOffer] = []
        self.replies = self.ask(start)

    @property
    def prefilled(self) -> Prefilled:
        (prefilled,) = (reply for reply in self.replies if isinstance(reply, Prefilled))
        return prefilled

    def ask(self, message: ToWorker) -> list[FromWorker]:
        replies = answers(self.worker, message)
        self.offers += [reply for reply in replies if isinstance(reply, KvOffer)]
        return replies

    def verify(self, tokens: Sequence[int] = (), parents: Sequence[int] = (), **others: Any) -> Verify:
        place = len(self.tokens) - 1
        entries = (self.tokens[-1], *tokens), (-1, *parents)
        return Verify(self.sequence, self.round, self.root, place, *entries, **others)

    def fold(self, verify: Verify, replies: Iterable[FromWorker]) -> Verdict:
        """Commit what the verdict among the replies accepts."""
        (verdict,) = (each for each in replies if isinstance(each, Verdict) and each.request == self.sequence)
        ids = [verify.root]
        for token, parent in zip(verify.tokens[1:], verify.parents[1:], strict=True):
            ids.append(node_id(ids[parent], token))
        self.tokens += [*(verify.tokens[ids.index(node)] for node in verdict.path), verdict.bonus]
        self.root = node_id((self.root, *verdict.path)[-1], verdict.bonus)
        self.round += 1
        return verdict

    def step(self, tokens: Sequence[int] = (), parents: Sequence[int] = (), **others: Any) -> Verdict:
        verify = self.verify(tokens, parents, **others)
        return self.fold(verify, self.ask(verify))

    def decode(self, count: int) -> list[int]:
        """Rounds of single tokens; all tokens so far."""
        for _ in range(count):
            self.step()
        return self.tokens
