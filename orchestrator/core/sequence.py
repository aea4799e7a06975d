"""One request in progress: its committed tokens, its speculation, and where it stands with the target. Pure."""

from dataclasses import dataclass
from typing import Literal

from orchestrator.core.events import Request
from orchestrator.core.phases import Phase, Trigger, next_phase
from orchestrator.core.policy.decision import SequenceView
from orchestrator.core.policy.estimates import Estimates
from orchestrator.core.request_stats import RequestStats
from orchestrator.core.speculation import Speculation
from orchestrator.core.speculation_cache import CommitOutcome, SpeculationCache
from protocol.messages.base import MAX_ENDS, NodeId, SequenceId
from protocol.messages.plans import GrowthPlan
from protocol.messages.worker import KvReference, Reroot, Start, Verdict, Verify
from protocol.speculation.prompt_lookup import PromptLookup
from protocol.speculation.token_tree import Node, flatten, node_id

_SUFFIX = 8
"""Tokens of context handed to prompt lookup; its longest n-gram is shorter."""
_FIRST_ROOT = NodeId(0)


class Sequence:
    """Round r verifies below root r; its verdict makes root r + 1."""

    def __init__(self, id: SequenceId, request: Request, estimates: Estimates, draftable: bool, now: float) -> None:
        """`draftable`: the strategy uses a draft."""
        self.id = id
        self.request = request
        self.tokens = list(request.tokens)
        root = node_id(_FIRST_ROOT, self.tokens[-1])
        self.speculation = Speculation(root, self.tokens[-1], self.position, estimates, draftable, now)
        """Of the active draft, or of the last one that was active."""
        self.stats = RequestStats(now, len(request.tokens))
        self.round = 0
        self.phase = Phase.WAITING
        self.outstanding: Verify | None = None
        """The tree under verification."""
        self.sent_at = now
        """When the target was last sent something that it has to answer."""
        self.resends = 0
        """How often the outstanding tree was sent again."""
        self.prefill_deadline = now
        """When a prefill worker that evaluates the prompt should be done."""
        self.prefilled_arena = ""
        """Name of the arena that a prefill worker last offered for this sequence."""
        self.adopting: KvReference | None = None
        """What the last Start to the target named for adoption."""
        self.ready_since = now
        """When the present root became known."""
        self.waited = 0.0
        """Seconds of this round that were spent waiting for growth on purpose."""
        self._max_tokens = request.max_tokens
        self._lookup = PromptLookup()
        self._lookup.extend(self.tokens)
        self._sent: dict[NodeId, Node] = {}
        """Nodes under verification."""
        self._verified = self.speculation
        """The speculation whose tree is under verification, or was last."""

    @property
    def cache(self) -> SpeculationCache:
        return self.speculation.cache

    @property
    def estimates(self) -> Estimates:
        return self.speculation.estimates

    @property
    def position(self) -> int:
        """Absolute position of the root."""
        return len(self.tokens) - 1

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated."""
        return self._max_tokens - self.stats.generated

    @property
    def verifying_tree(self) -> bool:
        """The target was sent a tree with nodes below the root."""
        return self.outstanding is not None and len(self.outstanding.tokens) > 1

    # Phases -----------------------------------------------------------------------------------

    def enter(self, trigger: Trigger) -> None:
        """Move to the phase that follows. Raises AssertionError for a transition that does not exist."""
        self.phase = next_phase(self.phase, trigger)

    def preempt(self) -> None:
        """Give up the place, between two rounds."""
        self.enter(Trigger.PREEMPT)
        self.speculation.drafting = False

    def lose_target(self) -> None:
        """The target is gone; the next one has to be sent a Start."""
        self.enter(Trigger.TARGET_LOST)
        self.outstanding = None

    def delegate_prefill(self, now: float, deadline: float) -> None:
        """A prefill worker was sent the tokens before the root."""
        self.enter(Trigger.DELEGATE_PREFILL)
        self.sent_at = now
        self.prefill_deadline = deadline

    def start_on_target(self, now: float, adopting: KvReference | None) -> None:
        """The target was sent a Start that names `adopting`."""
        self.enter(Trigger.SEND_START)
        self.sent_at = now
        self.adopting = adopting

    def prefilled(self, now: float) -> None:
        """The target holds the KV before the root."""
        self.enter(Trigger.PREFILLED)
        self.ready_since = now

    def refuse_tree(self, now: float) -> bool:
        """The target refused the tree under verification: go on by plain decoding if it was the present draft's.

        Returns whether it was.
        """
        self.enter(Trigger.TREE_REFUSED)
        blamed = self._verified is self.speculation
        if blamed:
            self.speculation.distrust()
        self.outstanding = None
        self._sent = {}
        self.ready_since = now
        return blamed

    # Messages ---------------------------------------------------------------------------------

    def start_message(
        self, plan: GrowthPlan | None = None, vocabulary: int | None = None, adopt: KvReference | None = None
    ) -> Start:
        """The Start that serves this sequence from its committed tokens.

        A draft's names the growth plan and the target's vocabulary, a target's what it may adopt.
        """
        return Start(
            sequence=self.id,
            round=self.round,
            tokens=tuple(self.tokens),
            root=self.cache.root.id,
            sampling=self.request.sampling,
            vocabulary=vocabulary,
            plan=plan,
            adopt=adopt,
            prompt=len(self.request.tokens),
            ends=tuple(sorted(self.request.ends))[:MAX_ENDS],
        )

    def reroot_message(self, tokens: list[int], missed: bool, plan: GrowthPlan | None) -> Reroot:
        """The Reroot by which a draft follows the last commit, of `tokens`."""
        return Reroot(
            sequence=self.id,
            round=self.round,
            position=self.position - len(tokens),
            tokens=tuple(tokens),
            root=self.cache.root.id,
            missed=missed,
            plan=plan,
        )

    # Rounds -----------------------------------------------------------------------------------

    def limit_to_context(self, context: int) -> None:
        """Generate no more than a context of `context` tokens has room for."""
        self._max_tokens = min(self.request.max_tokens, context - len(self.request.tokens))

    def view(self, now: float, speculation: Speculation | None = None) -> SequenceView:
        """What a strategy decides on; with the `speculation` of another draft, if one is given."""
        speculation = speculation or self.speculation
        # The bonus takes one of the remaining tokens, so only the others can be drafted.
        return SequenceView(
            cache=speculation.cache,
            estimates=speculation.estimates,
            now=now,
            ready_since=self.ready_since,
            grown_at=speculation.grown_at,
            room=0 if speculation.plain else self.remaining - 1,
            drafting=speculation.drafting,
            lag=speculation.lag(self.ready_since),
            draft_ready_at=speculation.ready_at,
            guess=self._lookup_chain,
        )

    def verify(self, nodes: list[Node], now: float) -> Verify:
        """Put `nodes` under verification."""
        tokens, parents = flatten(self.cache.root, nodes)
        self._sent = {node.id: node for node in nodes}
        rejecting = self.request.sampling.verification == "rejection"
        self.outstanding = Verify(
            sequence=self.id,
            round=self.round,
            root=self.cache.root.id,
            position=self.position,
            tokens=tokens,
            parents=parents,
            distributions=self.cache.distributions(nodes) if rejecting else (),
        )
        self._verified = self.speculation
        self.enter(Trigger.SEND_TREE)
        self.waited = now - self.ready_since
        self.sent_at = now
        self.resends = 0
        return self.outstanding

    def answered_by(self, verdict: Verdict) -> bool:
        """Whether the verdict answers the outstanding tree.

        Its path must run from the root through nodes that were sent, and it must hold the log-probabilities that the
        request asked for.
        """
        if self.phase is not Phase.VERIFYING or verdict.round != self.round:
            return False
        if len(verdict.likelihoods) != (0 if self.request.sampling.logprobs is None else len(verdict.path) + 1):
            return False
        # By id, since the tree may be another draft's by now.
        parent = self.cache.root.id
        for id in verdict.path:
            node = self._sent.get(id)
            if node is None or node.parent is None or node.parent.id != parent:
                return False
            parent = id
        return True

    def learn(self, verdict: Verdict) -> None:
        """Compare what was believed along the verdict's path with what the target chose."""
        chosen = self.chosen(verdict)
        self.speculation.learn(chosen)
        self._learn_lookup(chosen)
        verified = {node.parent.id for node in self._sent.values() if node.parent is not None}
        end = verdict.path[-1] if verdict.path else self.cache.root.id
        # The path could have gone one deeper where its end had a child under verification.
        self.stats.round(len(verdict.path), len(verdict.path) + (end in verified), verdict.seconds)

    def record_overhead(self, verdict: Verdict, now: float) -> None:
        """Note what this round took beyond the forward and the wait on purpose."""
        seconds = max(0.0, now - self.ready_since - self.waited - verdict.seconds)
        self.stats.overhead(seconds)
        self.estimates.hop.observe(seconds)

    def chosen(self, verdict: Verdict) -> list[int]:
        """The accepted tokens and the bonus."""
        return [*(self._sent[id].token for id in verdict.path), verdict.bonus]

    def commit(self, tokens: list[int], now: float) -> CommitOutcome:
        """Move the root to the last of `tokens`."""
        self.enter(Trigger.COMMIT)
        self.tokens += tokens
        self._lookup.extend(tokens)
        self.round += 1
        self.outstanding = None
        self._sent = {}
        self.ready_since = now
        return self.speculation.advance(tokens, self.round, now)

    def _lookup_chain(self, leaf: Node, limit: int) -> list[tuple[int, float]]:
        """At most `limit` guesses (token, believed probability) by prompt lookup, one after the other behind `leaf`."""
        path: list[int] = []
        node: Node | None = leaf
        while node is not None and node.parent is not None and len(path) < _SUFFIX:
            path.append(node.token)
            node = node.parent
        suffix = [*self.tokens[-_SUFFIX:], *path[::-1]]
        guesses: list[tuple[int, float]] = []
        while len(guesses) < limit:
            best = self._lookup.continuations(suffix, 1)
            if not best:
                break
            token, claimed = best[0]
            guesses.append((token, self.estimates.lookup(claimed, 0)))
            suffix.append(token)
        return guesses

    def _learn_lookup(self, chosen: list[int]) -> None:
        """Calibrate prompt lookup by its first guess, whether or not it was sent."""
        guesses = self._lookup.continuations(self.tokens[-_SUFFIX:], 1)
        if guesses:
            self.estimates.lookup.observe(guesses[0][1], 0, guesses[0][0] == chosen[0])


@dataclass(frozen=True, slots=True)
class Truncation:
    """Tokens that may leave, and the finish reason if they are the last ones."""

    tokens: list[int]
    reason: Literal["stop", "length"] | None


def truncated(request: Request, tokens: list[int], remaining: int) -> Truncation:
    """`tokens` up to the first end-of-sequence token, and at most `remaining` of them."""
    for index, token in enumerate(tokens[:remaining]):
        if token in request.ends:
            return Truncation(tokens[: index + 1], "stop")
    return Truncation(tokens[:remaining], "length" if len(tokens) >= remaining else None)
