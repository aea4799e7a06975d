"""A request at a draft worker, as the orchestrator tells it, and the orchestrator's view of its tree."""

from collections.abc import Iterable, Sequence
from typing import Any

from draft_worker.engine_interface import Engine
from draft_worker.worker import DraftWorker
from protocol.messages.base import NodeId, RequestId
from protocol.messages.plans import BestFirst, GrowthPlan
from protocol.messages.sampling import Sampling
from protocol.messages.worker import Grow, Reroot, Start, ToWorker
from protocol.speculation.token_tree import Node, TokenTree, node_id
from protocol.worker.interface import WorkerReply

ONE, TWO = RequestId(1), RequestId(2)
ROOT = NodeId(1000)
GREEDY = Sampling()


class Conversation:
    """`worker` may serve other requests too."""

    def __init__(
        self,
        worker: DraftWorker | Engine,
        prompt: Sequence[int],
        plan: GrowthPlan | None = None,
        sampling: Sampling = GREEDY,
        id: RequestId = ONE,
        **stated: Any,
    ) -> None:
        """`stated`: further fields of `Start`."""
        self.worker = worker if isinstance(worker, DraftWorker) else DraftWorker(worker, lambda: 0.0)
        self.id, self.sampling, self.stated = id, sampling, stated
        self.plan = plan or BestFirst(width=2, fan=3)
        self.tokens = list(prompt)
        self.round, self.root = 0, ROOT
        self.tree = TokenTree(ROOT, prompt[-1], len(prompt) - 1)

    def started(self) -> Start:
        return Start(self.id, self.round, tuple(self.tokens), self.root, self.sampling, self.plan, **self.stated)

    def start(self) -> list[WorkerReply]:
        return self.tell(self.started())

    def tell(self, message: ToWorker) -> list[WorkerReply]:
        return self._seen(self.worker.handle(message))

    def work(self, units: int = 1) -> list[WorkerReply]:
        return [reply for _ in range(units) if self.worker.has_work for reply in self._seen(self.worker.work())]

    def grow(self, steps: int) -> list[Grow]:
        """Prefill, then at most `steps` growth steps."""
        found: list[Grow] = []
        while self.worker.has_work and len(found) < steps:
            found += grows(self.work())
        return found

    def reroot(self, *tokens: int, missed: bool = False, plan: GrowthPlan | None = None, anew: bool = False) -> Reroot:
        """The message for `tokens`. Updates the orchestrator's view, which is empty after a miss."""
        position, self.root, self.round = len(self.tokens) - 1, below(self.root, tokens), self.round + 1
        self.tokens += tokens
        self.tree.advance(tokens)
        if missed:
            self.tree = TokenTree(self.root, tokens[-1], len(self.tokens) - 1)
        return Reroot(self.id, self.round, position, tuple(tokens), self.root, missed, plan, anew=anew)

    def commit(self, *tokens: int, **options: Any) -> list[WorkerReply]:
        return self.tell(self.reroot(*tokens, **options))

    def behind(self, node: Node) -> list[int]:
        """The tokens from the root down to `node`, without the root's."""
        return [] if node.parent is None else [*self.behind(node.parent), node.token]

    def best(self) -> list[Node]:
        """The most probable path below the root."""
        path = [self.tree.root]
        while path[-1].children:
            path.append(max(path[-1].children.values(), key=lambda child: child.probability))
        return path[1:]

    def _seen(self, replies: Iterable[WorkerReply]) -> list[WorkerReply]:
        replies = list(replies)
        for grow in grows(replies):
            if (grow.request, grow.round) == (self.id, self.round):
                for parent, token, probability in zip(grow.parents, grow.tokens, grow.probabilities, strict=True):
                    node = self.tree.get(parent)
                    assert node is not None, "a parent is published before its children"
                    self.tree.add(node, token, probability)
        return replies


def below(root: NodeId, tokens: Iterable[int]) -> NodeId:
    """The node behind `tokens`."""
    for token in tokens:
        root = node_id(root, token)
    return root


def grows(replies: Iterable[WorkerReply]) -> list[Grow]:
    return [reply for reply in replies if isinstance(reply, Grow)]
