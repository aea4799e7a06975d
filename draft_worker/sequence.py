"""One sequence at the draft: which tokens have KV, the tree below the root, and the next unit of work.

Pure over an engine's sequence. Knows no transport; the clock is the caller's.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from draft_worker.engine import Batch, EngineSequence
from protocol.kv.prefix_index import common_prefix
from protocol.messages.base import NodeId
from protocol.messages.plans import BestFirst
from protocol.messages.worker import Grow, KvOffer, KvReference, Prefilled, Reroot, Start
from protocol.sampling.grammar import GrammarError
from protocol.speculation.calibration import Calibration
from protocol.speculation.candidates import Candidates
from protocol.speculation.growth import TreeGrowth
from protocol.speculation.publication import StepCost, growth_messages
from protocol.speculation.token_tree import Node, TokenTree, node_id

if TYPE_CHECKING:
    from protocol.sampling.logits_processors import LogitsProcessors

_CATCH_UP = 16
"""Committed tokens without KV that ride along with the root's forward; more of them are prefilled."""
_DEFAULT_PLAN = BestFirst(width=8, fan=4)


class DraftSequence:
    """From a Start on. The root has no KV until it is evaluated as a node of its own tree."""

    def __init__(
        self,
        start: Start,
        engine: EngineSequence,
        horizon: int,
        calibration: Calibration,
        held: int = 0,
        restraint: "LogitsProcessors | None" = None,
    ) -> None:
        """`horizon`: the first absolute position that is never evaluated. `calibration` is shared by the
        sequences that are sampled in a like manner. `held`: so many tokens of `start` are prefilled already."""
        self._calibration = calibration
        self.sampling = start.sampling
        self.vocabulary = start.vocabulary
        self.id = start.sequence
        self.engine = engine
        self._horizon = horizon
        self._held: list[int] = list(start.tokens[:held])
        """Tokens of the engine's committed prefix."""
        self._adopted: Prefilled | None = None
        """What came of KV that was there already, until it is told."""
        if held:
            self._adopted = self._outcome(start)
        elif start.adopt is not None:
            self._adopt(start, start.adopt)
        self.restart(start, restraint)

    def restart(self, start: Start, restraint: "LogitsProcessors | None" = None) -> None:
        """Serve `start`, with the KV of the prefix that it shares with what is held; `restraint` is as of its root."""
        self._restraint = restraint
        committed = start.tokens[:-1]
        shared = common_prefix(self._held, committed)
        self.engine.truncate(shared)
        del self._held[shared:]
        self._backlog = list(committed[shared:])
        """Committed tokens that the engine has yet to see."""
        self._rows: dict[NodeId, int] = {}
        self.round = start.round
        tree = TokenTree(start.root, start.tokens[-1], len(committed))
        forced = None if start.sampling.grammar is None or restraint is None else self._forced
        self._growth = TreeGrowth(tree, start.plan or _DEFAULT_PLAN, self._horizon, self._calibration, forced)

    @property
    def position(self) -> int:
        """Absolute position of the root."""
        return self._growth.tree.root.depth

    @property
    def has_work(self) -> bool:
        return self._growth.next_step() is not None

    def follows(self, message: Reroot) -> bool:
        """Whether `message` continues from our root."""
        root = self._growth.tree.root.id
        for token in message.tokens:
            root = node_id(root, token)
        return message.position == self.position and message.root == root

    def reroot(self, message: Reroot) -> Iterator[Grow]:
        """Move on; what survives is published again if the other side has nothing."""
        self._commit(self._growth.advance(message.tokens, message.plan))
        self.round = message.round
        if self._restraint is not None:
            self._restraint.advance(message.tokens)
        survivors = list(self._growth.surviving()) if message.missed else []
        fresh = survivors + self._growth.publish()
        if fresh:
            yield from self.publish(fresh)

    @property
    def prefilling(self) -> bool:
        """So many tokens have no KV that they need forwards of their own before anything can grow."""
        return len(self._backlog) > _CATCH_UP and self.has_work

    def prefill(self, chunk: int) -> None:
        """One forward over at most `chunk` of them."""
        tokens = self._backlog[:chunk]
        self.engine.prefill(tokens)
        self._held += tokens
        del self._backlog[:chunk]

    def ask(self) -> Batch:
        """What the next growth step evaluates; there must be work, and nothing to prefill first."""
        step = self._growth.next_step()
        assert step is not None
        assert len(self._backlog) <= _CATCH_UP, "the prompt is prefilled first"
        parents = []
        for row, node in enumerate(step.nodes, start=self.engine.next_row + len(self._backlog)):
            parents.append(-1 if node.parent is None else self._rows[node.parent.id])
            self._rows[node.id] = row
        length = self.engine.path_tokens
        contexts = [self._path(node, length) for node in step.nodes] if length else []
        tokens = [node.token for node in step.nodes]
        paths = [_below_root(node) for node in step.nodes] if self._restraint is not None else []
        return Batch(
            self._backlog, tokens, parents, contexts, step.limit, step.saguaro, step.fans, self._restraint, paths
        )

    def expand(self, candidates: Sequence[Candidates]) -> list[Node]:
        """What the engine said to `ask`; returns the new nodes."""
        step = self._growth.next_step()
        assert step is not None
        self._held += self._backlog
        self._backlog = []
        return self._growth.expand(step, candidates)

    def publish(
        self, nodes: Sequence[Node], evaluated: int = 0, seconds: float = 0.0, joint: int = 0
    ) -> Iterator[Grow]:
        """Tell of new nodes, and of what the step that found them took; `joint` as in a Grow."""
        candidates = self._growth.candidates
        return growth_messages(self.id, self.round, nodes, candidates, StepCost(evaluated, seconds, joint))

    def spared(self) -> Iterator[Prefilled]:
        """Once, before the first growth: how much need not be prefilled, or why it had to be."""
        if self._adopted is not None:
            told, self._adopted = self._adopted, None
            yield told

    def news(self, clock: Callable[[], float]) -> Iterator[KvOffer]:
        """Where the KV here can be adopted after this life."""
        begin = clock()
        saved = self.engine.save()
        if saved is not None:
            yield KvOffer(self.id, saved.name, saved.tokens, self.engine.size, clock() - begin)

    @property
    def kv(self) -> EngineSequence:
        return self.engine

    @property
    def prefix(self) -> list[int]:
        """Tokens before the root."""
        return self._held + self._backlog

    @property
    def prefilled(self) -> int:
        """How many of them have KV."""
        return len(self._held)

    def take_over(self, engine: EngineSequence, held: int) -> None:
        """Go on with an engine's sequence that has the KV of the first `held` tokens; the prompt is being prefilled."""
        prefix = self.prefix
        self.engine = engine
        self._held, self._backlog = prefix[:held], prefix[held:]
        self._adopted = Prefilled(self.id, self.round, len(self._backlog), 0.0, held)

    def _forced(self, node: Node) -> int | None:
        assert self._restraint is not None
        try:
            return self._restraint.forced(_below_root(node))
        except GrammarError:
            return None

    def _adopt(self, start: Start, reference: KvReference) -> None:
        """Whatever is wrong with what is offered costs a prefill and is told."""
        warning = "The KV offered to the draft goes beyond the root."
        if reference.tokens < len(start.tokens):
            warning = self.engine.adopt(reference)
        if not warning:
            self._held = list(start.tokens[: reference.tokens])
        self._adopted = self._outcome(start, warning)

    def _outcome(self, start: Start, warning: str = "") -> Prefilled:
        missing = len(start.tokens) - 1 - len(self._held)
        return Prefilled(start.sequence, start.round, missing, 0.0, len(self._held), warning[:4000])

    def _path(self, node: Node | None, length: int) -> list[int]:
        """The last `length` tokens up to and including `node`."""
        reverse: list[int] = []
        while node is not None and len(reverse) < length:
            reverse.append(node.token)
            node = node.parent
        for committed in (self._backlog, self._held):
            missing = length - len(reverse)
            reverse += reversed(committed[-missing:] if missing else [])
        return reverse[::-1]

    def _commit(self, nodes: Sequence[Node]) -> None:
        """The root moved behind `nodes`: those with KV join the prefix, the others wait for the next forward."""
        tree = self._growth.tree
        known = [node for node in nodes if node.id in self._rows] if not self._backlog else []
        path = [self._rows[node.id] for node in known]
        self._rows = {id: row for id, row in self._rows.items() if id in tree}
        self.engine.keep(path, self._rows.values())
        self._held += [node.token for node in known]
        self._backlog += [node.token for node in nodes[len(known) :]]


def _below_root(node: Node) -> list[int]:
    """Tokens between the root and `node`, itself included."""
    reverse: list[int] = []
    while node.parent is not None:
        reverse.append(node.token)
        node = node.parent
    return reverse[::-1]
