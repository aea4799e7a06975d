"""One request in progress: its committed tokens, its cache, and where it stands with each worker. Pure."""

from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal

from orchestrator.core.events import Request
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
"""Tokens that prompt lookup looks at, and more."""
_FIRST_ROOT = NodeId(0)


class Phase(Enum):
    """What the target is doing for a sequence."""

    QUEUED = auto()
    """Nothing: others have their turns."""
    ELSEWHERE = auto()
    """Nothing yet: a prefill worker reads the prompt."""
    PREFILLING = auto()
    FREE = auto()
    """The root is known and nothing is under verification."""
    VERIFYING = auto()


class Sequence:
    """Round r verifies below root r; its verdict makes root r + 1."""

    def __init__(self, id: SequenceId, request: Request, estimates: Estimates, draftable: bool, now: float) -> None:
        self.id = id
        self.request = request
        self.tokens = list(request.tokens)
        root = node_id(_FIRST_ROOT, self.tokens[-1])
        self.speculation = Speculation(root, self.tokens[-1], self.position, estimates, draftable, now)
        """Of the draft that drafts, or of the last one that did."""
        self.tally = RequestStats(now, len(request.tokens))
        self.round = 0
        self.phase = Phase.PREFILLING
        self.outstanding: Verify | None = None
        self.asked_at = now
        """When the target was last told something that it has to answer."""
        self.repeats = 0
        """How often the target was asked the present question again."""
        self.patient_until = now
        """When a prefill worker that reads the prompt should be done."""
        self.prefilled_arena = ""
        """What a prefill worker last offered for it."""
        self.adopting: KvReference | None = None
        """What the target was last told to adopt."""
        self.free_since = now
        self.waited = 0.0
        """Seconds of this round that were spent waiting for growth on purpose."""
        self._most_tokens = request.max_tokens
        self._lookup = PromptLookup()
        self._lookup.extend(self.tokens)
        self._sent: dict[NodeId, Node] = {}
        self._asked_by = self.speculation
        """Whose tree is under verification, or was last."""

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
        return self._most_tokens - self.tally.generated

    @property
    def speculating(self) -> bool:
        """The target was told to verify more than the root."""
        return self.outstanding is not None and len(self.outstanding.tokens) > 1

    def distrust(self, now: float) -> bool:
        """Take back what is under verification, and go on by plain decoding if that was the present draft's; returns
        whether it was."""
        blamed = self._asked_by is self.speculation
        if blamed:
            self.speculation.distrust()
        self.phase = Phase.FREE
        self.outstanding = None
        self._sent = {}
        self.free_since = now
        return blamed

    def fit(self, context: int) -> None:
        """Generate no more than a context of so many tokens has room for."""
        self._most_tokens = min(self.request.max_tokens, context - len(self.request.tokens))

    def queue(self) -> None:
        """Make room for others; between two rounds."""
        self.phase = Phase.QUEUED
        self.speculation.drafting = False

    def read_elsewhere(self, now: float, until: float) -> None:
        """A prefill worker was asked to read the tokens before the root."""
        self.phase = Phase.ELSEWHERE
        self.asked_at = now
        self.patient_until = until

    def read_here(self, now: float, adopting: KvReference | None) -> None:
        """The target was asked to start."""
        self.phase = Phase.PREFILLING
        self.asked_at = now
        self.adopting = adopting

    def start(
        self, plan: GrowthPlan | None = None, vocabulary: int | None = None, adopt: KvReference | None = None
    ) -> Start:
        """What a worker needs to serve this sequence from its committed tokens; a draft is told how to grow
        and the target's vocabulary, a target what it may adopt."""
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

    def view(self, now: float, speculation: Speculation | None = None) -> SequenceView:
        """What there is to decide on; with the `speculation` of another draft, if one is given."""
        speculation = speculation or self.speculation
        # The bonus takes one of the remaining tokens, so only the others can be drafted.
        return SequenceView(
            cache=speculation.cache,
            estimates=speculation.estimates,
            now=now,
            free_since=self.free_since,
            grown_at=speculation.grown_at,
            room=0 if speculation.plain else self.remaining - 1,
            drafting=speculation.drafting,
            owing=speculation.owing(self.free_since),
            ready_at=speculation.ready_at,
            guess=self._guesses,
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
        self._asked_by = self.speculation
        self.phase = Phase.VERIFYING
        self.waited = now - self.free_since
        self.asked_at = now
        self.repeats = 0
        return self.outstanding

    def accepts(self, verdict: Verdict) -> bool:
        """The verdict answers the outstanding Verify, its path runs from the root through nodes that were sent, and
        it tells what it was to tell of each token."""
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
        chosen = self.tokens_of(verdict)
        self.speculation.learn(chosen)
        self._learn_lookup(chosen)
        verified = {node.parent.id for node in self._sent.values() if node.parent is not None}
        end = verdict.path[-1] if verdict.path else self.cache.root.id
        # The path could have gone one deeper where its end had a child under verification.
        self.tally.round(len(verdict.path), len(verdict.path) + (end in verified), verdict.seconds)

    def note_overhead(self, verdict: Verdict, now: float) -> None:
        """What this round took beyond the forward and what was waited on purpose."""
        seconds = max(0.0, now - self.free_since - self.waited - verdict.seconds)
        self.tally.overhead(seconds)
        self.estimates.hop.observe(seconds)

    def tokens_of(self, verdict: Verdict) -> list[int]:
        """The accepted tokens and the bonus."""
        return [*(self._sent[id].token for id in verdict.path), verdict.bonus]

    def commit(self, tokens: list[int], now: float) -> CommitOutcome:
        """Move the root to the last of `tokens`."""
        self.tokens += tokens
        self._lookup.extend(tokens)
        self.round += 1
        self.phase = Phase.FREE
        self.outstanding = None
        self._sent = {}
        self.free_since = now
        return self.speculation.advance(tokens, self.round, now)

    def reroot(self, tokens: list[int], missed: bool, plan: GrowthPlan | None) -> Reroot:
        """What the draft needs to follow the last commit of `tokens`."""
        return Reroot(
            sequence=self.id,
            round=self.round,
            position=self.position - len(tokens),
            tokens=tuple(tokens),
            root=self.cache.root.id,
            missed=missed,
            plan=plan,
        )

    def _guesses(self, leaf: Node, most: int) -> list[tuple[int, float]]:
        """A chain of at most `most` free guesses (token, belief) of what follows the path from the root to `leaf`."""
        path: list[int] = []
        node: Node | None = leaf
        while node is not None and node.parent is not None and len(path) < _SUFFIX:
            path.append(node.token)
            node = node.parent
        suffix = [*self.tokens[-_SUFFIX:], *path[::-1]]
        guesses: list[tuple[int, float]] = []
        while len(guesses) < most:
            best = self._lookup.continuations(suffix, 1)
            if not best:
                break
            token, claimed = best[0]
            guesses.append((token, self.estimates.lookup(claimed, 0)))
            suffix.append(token)
        return guesses

    def _learn_lookup(self, chosen: list[int]) -> None:
        """What the first free guess would have been worth, whether or not it was sent."""
        guesses = self._lookup.continuations(self.tokens[-_SUFFIX:], 1)
        if guesses:
            self.estimates.lookup.observe(guesses[0][1], 0, guesses[0][0] == chosen[0])


@dataclass(frozen=True, slots=True)
class Truncation:
    """Tokens that may leave, and why they are the last, if they are."""

    tokens: list[int]
    reason: Literal["stop", "length"] | None


def truncated(request: Request, tokens: list[int], remaining: int) -> Truncation:
    """End `tokens` behind the first end-of-sequence token, or where the request has had enough."""
    for index, token in enumerate(tokens[:remaining]):
        if token in request.ends:
            return Truncation(tokens[: index + 1], "stop")
    return Truncation(tokens[:remaining], "length" if len(tokens) >= remaining else None)
