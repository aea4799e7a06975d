"""One sequence at the draft: the tokens that have KV, the token tree, and the next unit of work.

Pure over an engine's sequence. Knows no transport; the caller passes the clock.
"""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from draft_worker.engine_interface import Batch, EngineSequence
from draft_worker.features import FeatureFeed
from draft_worker.growth import TreeGrowth
from protocol.common_prefix import common_prefix
from protocol.messages.base import MAX_NODES, NodeId
from protocol.messages.features import Features, FeatureShipment
from protocol.messages.plans import BestFirst, GrowthPlan
from protocol.messages.worker import Extend, Grow, Prefilled, Reroot, Start, Unfit
from protocol.speculation.prompt_lookup import LONGEST, PromptLookup
from protocol.speculation.rolling_context import RollingContext
from protocol.speculation.token_tree import Calibration, Candidates, Node, TokenTree, node_id
from protocol.worker.pacing import PacedPart

if TYPE_CHECKING:
    from protocol.sampling.logits_processors import LogitsProcessors

_CATCH_UP = 16
"""At most this many committed tokens without KV join the root's forward. More of them are prefilled."""
_MOST_FOLLOWERS = 8
"""Guesses by prompt lookup that a node's candidates are mixed with."""
_LEAST_FOLLOWER = 0.05
"""Probability below which such a guess is left out: the draft's own is as good."""
_CHECKED = 64
"""Guesses after which a drafter that was not reported fits."""
_FITTING, _FOREIGN = 0.3, 0.1
"""A trained drafter's first guess is right in a third of all cases or more, on any text and at any temperature. The
most frequent tokens alone make a few hundredths."""
_EVIDENCE = math.log(20)
"""Log of the odds at which it is reported: 12 wrong guesses in a row. One of 30% is reported in one of 20 runs
(Wald's test of a ratio), one of 35% in one of 100."""
_DEFAULT_PLAN = BestFirst(width=8, fan=4)


class DraftSequence:
    """One request from its Start on. The root has no KV until a growth step evaluates it as a node of its own tree."""

    def __init__(
        self,
        start: Start,
        engine: EngineSequence,
        rolling: RollingContext,
        calibration: Calibration,
        held: int = 0,
        processors: "LogitsProcessors | None" = None,
    ) -> None:
        """Sequences with like sampling share `calibration`. `held`: of the tokens of `start` that `rolling` lets the
        engine see, the number of those that have KV in `engine` already."""
        self._calibration = calibration
        self.sampling = start.sampling
        self.vocabulary = start.vocabulary
        self.id = start.request
        self.engine = engine
        self._rolling = rolling
        self._skipped = rolling.skipped(len(start.tokens) - 1)
        """Tokens that the engine does not see."""
        self._held: list[int] = rolling.seen(start.tokens[:-1])[:held]
        """Tokens of the engine's committed prefix."""
        self._reuse: Prefilled | None = None
        """The report on KV that was reused, until it is sent."""
        if held:
            missing = len(rolling.seen(start.tokens[:-1])) - held
            self._reuse = Prefilled(start.request, start.round, missing, 0.0, held)
        self.restart(start, processors)

    def restart(self, start: Start, processors: "LogitsProcessors | None" = None) -> None:
        """Serve `start`, and keep the KV of the prefix that it shares with the tokens so far. `processors` are as of
        its root."""
        self._processors = processors
        self._tokens: list[int] = list(start.tokens[:-1])
        """All tokens before the root."""
        self._lookup = PromptLookup()
        """Of those of these tokens that were needed so far."""
        self.round = start.round
        self._early: Extend | None = None
        """A request for growth below a root that is not known yet."""
        self._plan = self._within(start.plan or _DEFAULT_PLAN)
        self._begin(start.root, start.tokens[-1])

    @property
    def position(self) -> int:
        """Absolute position of the root."""
        return self._growth.tree.root.depth

    @property
    def has_work(self) -> bool:
        return self._growth.next_step() is not None

    def follows(self, message: Reroot) -> bool:
        """Whether `message` continues from this sequence's root."""
        root = self._growth.tree.root.id
        for token in message.tokens:
            root = node_id(root, token)
        return message.position == self.position and message.root == root

    def reroot(self, message: Reroot) -> Iterator[Grow]:
        """Move the root. If the round was a miss, publish the surviving nodes again: the orchestrator has none."""
        if message.plan is not None:
            self._plan = self._within(message.plan)
        self._commit(self._growth.advance(message.tokens, self._plan))
        if message.anew or self._rolling.skipped(len(self._tokens)) != self._skipped:
            root = self._growth.tree.root
            self._begin(root.id, root.token)
        else:
            self._tokens_changed()
        self.round = message.round
        if self._early is not None:
            self.extend(self._early)
        if self._processors is not None:
            self._processors.advance(message.tokens)
        survivors = list(self._growth.surviving()) if message.missed else []
        fresh = survivors + self._growth.publish()
        if fresh:
            yield from self.publish(fresh)

    def extend(self, message: Extend) -> None:
        """Continue after a pause. The request may arrive before the Reroot to its root."""
        if message.round == self.round:
            self._growth.extend(message.steps)
        elif message.round > self.round:
            self._early = message

    @property
    def prefilling(self) -> bool:
        """Whether so many tokens have no KV that they need forwards of their own before the tree can grow."""
        return len(self._backlog) > _CATCH_UP and self.has_work

    def prefill(self, chunk: int) -> PacedPart:
        """One forward over at most `chunk` of the committed tokens without KV. Returns what it read."""
        tokens, context = self._backlog[:chunk], self.engine.committed
        self.engine.prefill(tokens)
        self._held += tokens
        del self._backlog[:chunk]
        return PacedPart(len(tokens), context)

    @property
    def next_nodes(self) -> int:
        """Nodes that the next growth step evaluates."""
        step = self._growth.next_step()
        return 0 if step is None else len(step.nodes)

    @property
    def next_rows(self) -> int:
        """Rows that it evaluates: also those of committed tokens without KV."""
        return len(self._backlog) + self.next_nodes

    def next_batch(self) -> Batch:
        """The input of the next growth step. There must be work, and nothing to prefill first."""
        step = self._growth.next_step()
        assert step is not None
        assert len(self._backlog) <= _CATCH_UP, "the prompt is prefilled first"
        parents = []
        for row, node in enumerate(step.nodes, start=self.engine.next_row + len(self._backlog)):
            parents.append(-1 if node.parent is None else self._rows[node.parent.id])
            self._rows[node.id] = row
        followers = self._followers(step.nodes)
        tokens = [node.token for node in step.nodes]
        paths = [] if self._processors is None else [_path(node) for node in step.nodes]
        return Batch(self._backlog, tokens, parents, step.limit, self._processors, paths, followers, self._skipped)

    def expand(self, candidates: Sequence[Candidates]) -> list[Node]:
        """Grow the tree by the candidates for `next_batch`; returns the new nodes."""
        step = self._growth.next_step()
        assert step is not None
        self._held += self._backlog
        self._backlog = []
        return self._growth.expand(step, candidates)

    def publish(
        self, nodes: Sequence[Node], evaluated: int = 0, seconds: float = 0.0, joint: int = 0, staleness: int = 0
    ) -> Iterator[Grow]:
        """The nodes as one Grow, or as several if they exceed its bound. The first one has the cost of the growth step.

        A step that added no node is a Grow too: it shows that the draft is not silent.
        """
        for start in range(0, max(1, len(nodes)), MAX_NODES):
            part = nodes[start : start + MAX_NODES]
            yield Grow(
                request=self.id,
                round=self.round,
                parents=tuple(node.parent.id for node in part if node.parent is not None),
                tokens=tuple(node.token for node in part),
                probabilities=tuple(node.probability for node in part),
                evaluated=evaluated,
                seconds=seconds,
                forward_nodes=joint,
                staleness=staleness,
            )
            evaluated, seconds, joint, staleness = 0, 0.0, 0, 0

    def reuse(self) -> Iterator[Prefilled]:
        """Once, before the first growth: how many tokens had KV already."""
        if self._reuse is not None:
            report, self._reuse = self._reuse, None
            yield report

    @property
    def kv(self) -> EngineSequence:
        return self.engine

    @property
    def prefix(self) -> list[int]:
        """Tokens before the root that the engine sees."""
        return self._held + self._backlog

    @property
    def prefilled(self) -> int:
        """Number of the first tokens of `prefix` that have KV."""
        return len(self._held)

    def take_over(self, engine: EngineSequence, held: int) -> None:
        """Continue with an engine's sequence that has the KV of the first `held` tokens. No node may have
        been evaluated."""
        prefix = self.prefix
        self.engine = engine
        self._held, self._backlog = prefix[:held], prefix[held:]
        self._reuse = Prefilled(self.id, self.round, len(self._backlog), 0.0, held)
        self._tokens_changed()

    def close(self) -> None:
        """The sequence has ended; its KV may go on."""

    def _tokens_changed(self) -> None:
        """The engine's tokens have changed."""

    def _begin(self, root: NodeId, token: int) -> None:
        """Grow anew from the root behind `_tokens`, and keep the KV of what the engine goes on seeing."""
        length = len(self._tokens)
        seen, skipped = self._rolling.seen(self._tokens), self._rolling.skipped(length)
        shared = common_prefix(self._held, seen)
        if skipped != self._skipped:
            # Behind the sinks, a token that is the same by chance was read with the features of another one.
            shared = min(shared, self._rolling.sinks)
        self._skipped = skipped
        shared = self.engine.reach(shared)
        self.engine.truncate(shared)
        del self._held[shared:]
        self._backlog = seen[shared:]
        """Committed tokens without KV."""
        self._rows: dict[NodeId, int] = {}
        forced = None if self.sampling.grammar is None or self._processors is None else self._forced
        tree, horizon = TokenTree(root, token, length), self._rolling.horizon(length)
        self._growth = TreeGrowth(tree, self._plan, horizon, self._calibration, forced)
        self._tokens_changed()

    def _within(self, plan: GrowthPlan) -> GrowthPlan:
        """`plan`, with steps as wide as the engine evaluates at once."""
        most = self.engine.step_nodes
        if most is None or not isinstance(plan, BestFirst) or plan.width <= most:
            return plan
        return msgspec.structs.replace(plan, width=most)

    def _followers(self, nodes: Sequence[Node]) -> list[list[tuple[int, float]]]:
        """For each node, guesses by prompt lookup, if the plan wants them."""
        lookup = self._lookup
        if not isinstance(self._plan, BestFirst) or not self._plan.lookup:
            return []
        lookup.extend(self._tokens[len(lookup) :])
        suffix, root = lookup.last(LONGEST), self._growth.tree.root.token
        found = (lookup.continuations([*suffix, root, *_path(node)], _MOST_FOLLOWERS) for node in nodes)
        return [[follower for follower in each if follower[1] >= _LEAST_FOLLOWER] for each in found]

    def _forced(self, node: Node) -> int | None:
        assert self._processors is not None
        return self._processors.forced(_path(node))

    def _commit(self, nodes: Sequence[Node]) -> None:
        """Commit `nodes`: the root has moved behind them. Nodes with KV join the prefix, the others wait for the next
        forward."""
        tree = self._growth.tree
        known = [node for node in nodes if node.id in self._rows] if not self._backlog else []
        path = [self._rows[node.id] for node in known]
        self._rows = {id: row for id, row in self._rows.items() if id in tree}
        self.engine.keep(path, self._rows.values())
        self._tokens += [node.token for node in nodes]
        self._held += [node.token for node in known]
        self._backlog += [node.token for node in nodes[len(known) :]]


def _path(node: Node) -> list[int]:
    """The tokens behind the root up to and with `node`."""
    reverse: list[int] = []
    while node.parent is not None:
        reverse.append(node.token)
        node = node.parent
    return reverse[::-1]


class AcceptanceCheck:
    """Whether a drafter fits its target, by its first guesses behind roots that it could see whole.

    A drafter that was made for another target of the same family has the right sizes, so that only this tells.
    """

    def __init__(self, expected: float = 0.0) -> None:
        """`expected`: share of right guesses in the target's own greedy text, which is easy, as far as it is known."""
        fitting, foreign = max(_FITTING, expected / 2), max(_FOREIGN, expected / 4)
        self._by_guess = math.log((1 - foreign) / (1 - fitting)), math.log(foreign / fitting)
        self._guesses = self._right = 0
        self._evidence = 0.0
        self._reported = False

    def observe(self, right: bool) -> None:
        """One guess, made without prompt lookup, which is right beside any drafter where text repeats itself."""
        if self._guesses < _CHECKED and self._evidence < _EVIDENCE:
            self._guesses += 1
            self._right += right
            self._evidence += self._by_guess[right]

    def report(self) -> Iterator[Unfit]:
        """Once, if the drafter seems to be another target's, or is read wrongly."""
        if self._evidence >= _EVIDENCE and not self._reported:
            self._reported = True
            yield Unfit(self._guesses, self._right)


class FeatureFedSequence(DraftSequence):
    """One sequence at a draft that reads the target's features.

    The engine is given all committed tokens at once, and computes their KV as their features arrive. The first growth
    step below a root waits for features, as long as `FeatureFeed` says.
    """

    def __init__(
        self,
        start: Start,
        engine: EngineSequence,
        rolling: RollingContext,
        calibration: Calibration,
        held: int,
        processors: "LogitsProcessors | None",
        feed: FeatureFeed,
        check: AcceptanceCheck,
    ) -> None:
        """`check`: of a draft that was trained for one target."""
        self._feed, self._check = feed, check
        self._checked: NodeId | None = None
        """The root whose guess counts for the check."""
        super().__init__(start, engine, rolling, calibration, held, processors)

    def restart(self, start: Start, processors: "LogitsProcessors | None" = None) -> None:
        self._feed.started(prompt=start.round == 0)
        super().restart(start, processors)

    @property
    def has_work(self) -> bool:
        evaluated = self._growth.tree.root.id in self._growth.candidates
        return self.engine.unread or (super().has_work and (evaluated or not self._feed.waiting))

    def next_batch(self) -> Batch:
        batch, root = super().next_batch(), self._growth.tree.root.id
        grows_root = root not in self._growth.candidates
        if grows_root and self.engine.staleness == 0 and batch.processors is None and not any(batch.followers[:1]):
            self._checked = root
        return batch

    def reroot(self, message: Reroot) -> Iterator[Grow]:
        root = self._growth.tree.root.id
        found = self._growth.candidates.get(root)
        if root == self._checked and found is not None and found.tokens:
            self._check.observe(found.tokens[0] == message.tokens[0])
        self._feed.rerooted()
        yield from super().reroot(message)

    def hear_features(self, message: Features | FeatureShipment) -> None:
        """A ring holds features of this sequence, or they came from another machine."""
        if isinstance(message, Features):
            self._feed.announce(message)
        else:
            self._feed.receive(message)
        self._tokens_changed()

    @property
    def prefilling(self) -> bool:
        """Whether so many features were fed that they are read in forwards of their own before the tree can grow."""
        return self.engine.unread

    def prefill(self, chunk: int) -> PacedPart:
        """One forward over at most `chunk` tokens whose features were fed. Returns what it read."""
        if not self.engine.unread:
            return PacedPart(0)
        tokens = self.engine.read(chunk)
        context = max(0, self.engine.committed - self.engine.staleness - tokens)
        self._tokens_changed()
        return PacedPart(tokens, context)

    @property
    def prefilled(self) -> int:
        """Number of the first tokens of `prefix` that have KV, or features to compute it from."""
        return super().prefilled - self.engine.staleness

    @property
    def can_take_over(self) -> bool:
        """No node was evaluated: another sequence's KV may replace this one's."""
        return not self._rows

    def close(self) -> None:
        self._feed.close()

    def _tokens_changed(self) -> None:
        """Give the engine all committed tokens, and the features that are there."""
        if self._backlog:
            self.engine.prefill(self._backlog)
            self._held += self._backlog
            self._backlog = []
        self._feed.feed(self.engine, len(self._tokens))
