"""One request in progress: its committed tokens, its speculation, and its phase with the target. Pure."""

import math
from collections.abc import Iterable
from typing import Literal

from msgspec.structs import replace

from orchestrator.core.estimates import Estimates, Instead, MeasuredRound
from orchestrator.core.events import Task
from orchestrator.core.expected_rate import best_count
from orchestrator.core.phases import AWAITING_TARGET, TRANSITIONS, DraftPhase, DraftTrigger, Phase, Trigger
from orchestrator.core.request_stats import RequestStats, plain_tokens_per_second
from orchestrator.core.speculation import Speculation
from orchestrator.core.tuning import TUNING
from protocol.messages.base import MAX_EOS_TOKENS, Level, NodeId, RequestId
from protocol.messages.kv import KvReference
from protocol.messages.plans import GrowthPlan
from protocol.messages.sampling import TokenLogprob
from protocol.messages.worker import Hello, Start, Verdict, Verify
from protocol.speculation.prompt_lookup import LONGEST, PromptLookup
from protocol.speculation.successors import Successors
from protocol.speculation.token_tree import Node, TokenTree, flatten, node_id

_FIRST_ROOT = NodeId(0)


class Request:
    """Round r verifies below root r; its verdict makes root r + 1."""

    def __init__(
        self,
        id: RequestId,
        task: Task,
        estimates: Estimates,
        draftable: bool,
        now: float,
        successors: Successors | None = None,
    ) -> None:
        """`draftable`: the strategy uses a draft. `successors`: what the target writes."""
        self.id = id
        self.task = task
        self.tokens = list(task.tokens)
        root = node_id(_FIRST_ROOT, self.tokens[-1])
        self.speculation = Speculation(root, self.tokens[-1], self.position, estimates, draftable, now)
        """Of the active draft, or of the last one that was active."""
        self.stats = RequestStats(now, len(task.tokens))
        self.round = 0
        self.phase = Phase.WAITING
        self.outstanding: Verify | None = None
        """The tree under verification."""
        self.sent_at = now
        """When the target was last sent a message that it has to answer."""
        self.unanswered = 0
        """How often that message was waited for in vain while the target lived; more is not waited for."""
        self.fruitless = 0
        """Rounds since the last verdict that were lost. A target that ends at work for this request makes them full."""
        self.suspect = False
        """A target ended while it computed for this request, and none has answered since."""
        self.read = 0
        """Tokens of the prompt that the target has read since its Start."""
        self.ready_since = now
        """When the present root became known."""
        self._waited = 0.0
        """Seconds that the present round was delayed to wait for growth."""
        self.anew = False
        """The present round began with a hit whose guesses were dropped for fresh ones."""
        self.began_with_hit = False
        """The present round began with a hit, whether or not its guesses were dropped."""
        self.level: Level = "tree"
        """What the target verifies."""
        self.alone = False
        """No other request may share its forwards."""
        self.plain_rounds = 0
        """Rounds in succession whose trees had no nodes."""
        self.began_early = self._goes_on = False
        """The target may have begun this round before its tree came; it may begin the next one so."""
        self._reading_due = now
        self.prompt_logprobs_left = len(task.tokens) - 1 if task.sampling.prompt_logprobs else 0
        """Tokens of the prompt whose token_logprobs the client waits for."""
        self._max_tokens = task.max_tokens
        self._lookup = PromptLookup(successors)
        self._vocabulary = 0
        """Of the target; 0 before one is up."""
        self._lookup.extend(self.tokens)
        self._verified_nodes: dict[NodeId, Node] = {}
        """Nodes under verification."""
        self._expected_tokens = 1.0
        """Expected of the round under verification."""
        self.costs_from = 0
        """Rounds before it say nothing about what forwards cost: the target copies KV that it took up."""
        self.ended_round = 1.0, 0.0
        """Of the last round: the tokens that were expected of it, and seconds from its root to the next root."""
        self._verified = self.speculation
        """The speculation whose tree is under verification, or was last."""
        self.instead: Instead | None = None
        """Of a round for which a draft in turns was asked."""

    @property
    def tree(self) -> TokenTree:
        return self.speculation.tree

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
        return self._max_tokens + len(self.task.tokens) - len(self.tokens)

    @property
    def verifying_tree(self) -> bool:
        """The target was sent a tree with nodes below the root."""
        return self.outstanding is not None and len(self.outstanding.tokens) > 1

    # Phases -----------------------------------------------------------------------------------

    def enter(self, trigger: Trigger) -> None:
        """Move to the phase that follows. Raises AssertionError for a transition that is not in the table."""
        following = TRANSITIONS.get((self.phase, trigger))
        assert following is not None, f"no transition from {self.phase.name} by {trigger.name}"
        self.phase = following

    def preempt(self) -> None:
        """Give up the place, between two rounds."""
        self.enter(Trigger.PREEMPT)
        self.speculation.stop()

    def lose_target(self, suspected: bool) -> bool:
        """The target is gone; the next one has to be sent a Start. `suspected`: if it was at work for this request,
        that may be why. Returns whether this request has had all its targets."""
        if suspected and self.phase in AWAITING_TARGET:
            self.suspect = True
            self.fruitless += TUNING.fruitless_rounds - self.fruitless % TUNING.fruitless_rounds
        self.enter(Trigger.TARGET_LOST)
        self.outstanding = None
        return self.fruitless >= TUNING.fruitless_targets * TUNING.fruitless_rounds

    def lose_round(self, now: float) -> None:
        """The target has lost the request. To say so again changes nothing."""
        if self.unanswered < TUNING.unanswered:
            self.unanswered, self.sent_at = TUNING.unanswered, now

    def delegate_prefill(self, now: float) -> None:
        """A prefill worker was sent the tokens before the root."""
        self.enter(Trigger.DELEGATE_PREFILL)
        self.sent_at = now

    def start_on_target(self, now: float) -> None:
        """The target was sent a Start."""
        self.enter(Trigger.SEND_START)
        self.sent_at = now
        self.unanswered = self.read = 0

    def start_message(
        self, plan: GrowthPlan | None = None, vocabulary: int | None = None, adopt: KvReference | None = None
    ) -> Start:
        """The Start that serves the request from its committed tokens.

        The target is asked for log-probabilities of the prompt until it has told all. A draft's Start names the growth
        plan and the target's vocabulary. Both may name an arena to adopt.
        """
        sampling, wanted = self.task.sampling, plan is None and self.prompt_logprobs_left
        return Start(
            request=self.id,
            round=self.round,
            tokens=tuple(self.tokens),
            root=self.speculation.tree.root.id,
            sampling=sampling if wanted else replace(sampling, prompt_logprobs=False),
            vocabulary=vocabulary,
            plan=plan,
            adopt=adopt,
            prompt_tokens=len(self.task.tokens),
            shared_prefix=self.task.shared_prefix,
            eos_tokens=tuple(sorted(self.task.eos_tokens))[:MAX_EOS_TOKENS],
        )

    def tell_prompt(self, first: int, token_logprobs: tuple[TokenLogprob, ...]) -> tuple[TokenLogprob, ...] | None:
        """What is new of the logprobs of the prompt's tokens from `first` on: a target that was started again tells
        all of them again. None if nobody asked for them, or if some before them are missing."""
        told = len(self.task.tokens) - 1 - self.prompt_logprobs_left
        if not self.task.sampling.prompt_logprobs or first > told:
            return None
        new = token_logprobs[told - first :][: self.prompt_logprobs_left]
        self.prompt_logprobs_left -= len(new)
        return new

    def reading_is_due(self, now: float) -> bool:
        """Whether the client is told again how far its prompt has been read."""
        due = now >= self._reading_due
        if due:
            self._reading_due = now + TUNING.reading_told
        return due

    def prefilled(self, now: float) -> None:
        """The target holds the KV before the root."""
        self.enter(Trigger.PREFILLED)
        self.ready_since, self.instead = now, None

    def refuse_tree(self, now: float) -> bool:
        """The target refused the tree under verification. Returns whether the present draft grew that tree.

        If it did, the request goes on by plain decoding.
        """
        self.enter(Trigger.TREE_REFUSED)
        present = self._verified is self.speculation
        if present:
            self.speculation.enter(DraftTrigger.REFUSE_TREE)
        self.outstanding = None
        self._verified_nodes = {}
        self.ready_since, self.instead = now, None
        return present

    # Rounds -----------------------------------------------------------------------------------

    def limit_to(self, target: Hello) -> None:
        """Generate no more than this target's context has room for, and verify no more than it can."""
        self._max_tokens = min(self.task.max_tokens, target.context - len(self.task.tokens))
        self.level, self._vocabulary = target.level, target.vocabulary
        self.alone = target.batch_dependent and target.level == "tree" and self.task.seeded

    @property
    def room(self) -> int:
        """Most tokens below the root that can still be used: the bonus takes one of the remaining ones."""
        return 0 if self.speculation.phase is DraftPhase.REFUSED else self.remaining - 1

    def verify(self, nodes: list[Node], now: float, goes_on: bool = False) -> Verify:
        """Put `nodes` under verification. `goes_on`: the target may begin the next round's root before it is asked."""
        root = self.speculation.tree.root
        tokens, parents = flatten(root, nodes)
        self._verified_nodes = {node.id: node for node in nodes}
        self.plain_rounds = 0 if nodes else self.plain_rounds + 1
        goes_on = goes_on and self.remaining > 1
        self.began_early, self._goes_on = self._goes_on, goes_on
        self.outstanding = Verify(
            request=self.id,
            round=self.round,
            root=root.id,
            position=self.position,
            tokens=tokens,
            parents=parents,
            plain_next=goes_on,
        )
        self._verified = self.speculation
        self._expected_tokens = 1.0 + sum(math.exp(node.log_path - root.log_path) for node in nodes)
        self.enter(Trigger.SEND_TREE)
        self._waited = now - self.ready_since
        self.sent_at = now
        self.unanswered = 0
        return self.outstanding

    def is_answered_by(self, verdict: Verdict) -> bool:
        """Whether the verdict answers the outstanding tree.

        Its path must run from the root through nodes that were sent, and it must hold the log-probabilities that the
        request asked for.
        """
        if self.phase is not Phase.VERIFYING or verdict.round != self.round or (verdict.root_alone and verdict.path):
            return False
        if len(verdict.token_logprobs) != (0 if self.task.sampling.logprobs is None else len(verdict.path) + 1):
            return False
        # By id, since the tree may be another draft's by now.
        parent = self.speculation.tree.root.id
        for id in verdict.path:
            node = self._verified_nodes.get(id)
            if node is None or node.parent is None or node.parent.id != parent:
                return False
            parent = id
        return True

    def chosen(self, verdict: Verdict) -> list[int]:
        """The accepted tokens and the bonus token. A target that had begun the round before its tree came has verified
        the root alone."""
        if verdict.root_alone and self.outstanding is not None:
            alone = replace(self.outstanding, tokens=self.outstanding.tokens[:1], parents=(-1,))
            self.outstanding, self._verified_nodes, self._expected_tokens = alone, {}, 1.0
        return [*(self._verified_nodes[id].token for id in verdict.path), verdict.bonus]

    def count_guessed(self, path: tuple[NodeId, ...]) -> None:
        """Count who had guessed the accepted tokens of a path, while it is under verification."""
        drafted = self.drafted(path)
        self.stats.draft_tokens += drafted
        self.stats.lookup_tokens += len(path) - drafted

    def drafted(self, path: Iterable[NodeId]) -> int:
        """How many of the nodes of such a path the draft has guessed."""
        # A guess by prompt lookup is no part of the tree, even if the draft has grown the same node since.
        return sum(self._verified.tree.get(id) is self._verified_nodes[id] for id in path)

    def lookup_chain(self, limit: int) -> Iterable[tuple[int, float]]:
        """At most `limit` guesses by prompt lookup behind the root, each with its claim."""
        return self._lookup.chain(self.tokens[-LONGEST:], limit)

    def measured(self, verdict: Verdict, now: float) -> MeasuredRound:
        """What the round took that this verdict ends."""
        tokens, seconds = self._expected_tokens, now - self.ready_since
        width = 1 + len(self._verified_nodes)
        return MeasuredRound(tokens, seconds, width, verdict.seconds, self.remaining, self._waited)

    def rate_without_draft(self) -> float:
        """Tokens a second that the present round is expected to give with the guesses of prompt lookup alone."""
        root, estimates = self.tree.root, self.estimates
        gains = self.tree.path_probabilities(self.guesses_behind(root))
        return best_count(gains, estimates.target, estimates.hop.get(0.0)).rate

    def plain_tokens_per_second(self) -> float | None:
        """Estimated for plain decoding. None where nothing can be guessed, and if most forwards had other requests."""
        alone = sum(one.count for one in self.stats.forwards.values())
        if not self.speculation.wanted or self.level == "plain" or 2 * alone < self.stats.rounds - 1:
            return None
        estimates, cost = self.speculation.estimates, self.speculation.estimates.target
        if not cost.known:
            return None
        return plain_tokens_per_second(self.stats.forwards, cost, estimates.slowdown, estimates.hop.get(0.0))

    def truncated(self, tokens: list[int]) -> tuple[list[int], Literal["stop", "length"] | None]:
        """`tokens` up to the first end-of-request token, and no more than may still be generated.

        With them the finish reason, if they are the last tokens of the request.
        """
        remaining = self.remaining
        tokens = tokens[:remaining]
        for index, token in enumerate(tokens):
            if token in self.task.eos_tokens:
                return tokens[: index + 1], "stop"
        return tokens, "length" if len(tokens) >= remaining else None

    def commit(self, tokens: list[int], refreshes: bool, now: float) -> bool:
        """Move the root to the last of `tokens`. Returns whether the round is a hit whose guesses are kept.

        `refreshes`: a hit may be given up for fresh guesses.
        """
        self.enter(Trigger.COMMIT)
        self.tokens += tokens
        self._lookup.extend(tokens)
        self.round += 1
        self.fruitless, self.suspect = 0, False
        self.ended_round = self._expected_tokens, now - self.ready_since
        self.ready_since = now
        self.outstanding = self.instead = None
        self._verified_nodes = {}
        hit = self.began_with_hit = self.speculation.commit(tokens, self.round, now)
        freshness = self.speculation.estimates.freshness
        self.anew = hit and refreshes and freshness is not None and freshness.choose()
        if self.anew:
            self.speculation.begin_anew(self.round, now)
        return hit and not self.anew

    def guesses_behind(self, leaf: Node) -> list[Node]:
        """A chain of guesses by prompt lookup, which is no part of the tree."""
        path: list[int] = []
        node = leaf
        while node.parent is not None and len(path) < LONGEST:
            path.append(node.token)
            node = node.parent
        limit = min(TUNING.lookup_tokens, self.speculation.tree.root.depth + self.room - leaf.depth)
        nodes: list[Node] = []
        least = self.speculation.tree.root.log_path + math.log(TUNING.lookup_least)
        for token, claimed in self._lookup.chain([*self.tokens[-LONGEST:], *path[::-1]], limit):
            if token >= self._vocabulary:
                break  # a table of another target
            belief = self.speculation.estimates.lookup(claimed, len(nodes))
            node = (nodes[-1] if nodes else leaf).guess(token, belief, belief)
            if node.log_path < least:
                break
            nodes.append(node)
        return nodes
