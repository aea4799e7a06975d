"""A draft on trial: what it grows is never sent, only compared with what the active draft's tree achieved. Pure."""

from dataclasses import dataclass, field

from orchestrator.core.policy.decision import Strategy, VerifyNodes
from orchestrator.core.sequence import Sequence
from orchestrator.core.speculation import Speculation
from protocol.messages.base import NodeId, SequenceId
from protocol.speculation.token_tree import node_id

_ROUNDS = 48
"""Rounds that are compared before the trial has an outcome."""
_MAX_ROUNDS = 4 * _ROUNDS
"""Rounds after which a draft that can't be compared yet (it still prefills) gives way to another one."""


@dataclass(slots=True)
class TokenRate:
    """Tokens and seconds, summed over rounds."""

    tokens: int = 0
    seconds: float = 0.0
    rounds: int = 0

    def add(self, tokens: int, seconds: float) -> None:
        self.tokens += tokens
        self.seconds += seconds
        self.rounds += 1

    @property
    def per_second(self) -> float:
        return self.tokens / max(1e-9, self.seconds)


@dataclass(slots=True)
class _Proposal:
    """Nodes that would have been sent. It may take more than one round to show how many the target accepts."""

    tip: NodeId
    """The last node that is known to be accepted."""
    nodes: frozenset[NodeId]
    seconds: float
    tokens: int = 1


@dataclass(slots=True)
class TrialSequence:
    """One sequence as it would go on with the draft on trial."""

    speculation: Speculation
    compared: bool
    """Its rounds count. A draft that came in the middle of a request prefills first, which would count against it."""
    began: float | None = None
    """When the present round began, until it is known what would have been sent."""
    until: float | None = None
    """Growth would have been worth waiting for until then."""
    proposals: list[_Proposal] = field(default_factory=list)


class Trial:
    """Each round is decided twice from the same root: with the active draft's tree, and with the other one's.

    The trees of the draft on trial are ready when it becomes active.
    """

    def __init__(
        self, incarnation: int, strategy: Strategy, sequences: dict[SequenceId, TrialSequence] | None = None
    ) -> None:
        """`incarnation`: that of the draft on trial; `sequences`: what it has grown already."""
        self.incarnation = incarnation
        self.sequences = sequences or {}
        self._strategy = strategy
        self._active, self._challenger = TokenRate(), TokenRate()
        self._rounds = 0

    def outcome(self, contested: bool) -> float | None:
        """Decoding speed with the draft on trial relative to the active one, once it is known.

        `contested`: another draft waits for its trial, so that one that can't be compared yet gives way with 0.
        """
        if self._challenger.rounds >= _ROUNDS:
            return self._challenger.per_second / max(1e-9, self._active.per_second)
        return 0.0 if contested and self._rounds >= _MAX_ROUNDS else None

    def grew(self, sequence: Sequence, now: float, alone: bool) -> None:
        """Growth of the draft on trial was merged; `alone`: there is no other request."""
        trial = self.sequences[sequence.id]
        trial.compared = True
        if alone:
            self._decide(trial, sequence, now)

    def round_sent(self, sequence: Sequence, now: float) -> None:
        """The target, which serves several requests, began a round with this one: what there is now counts."""
        trial = self.sequences.get(sequence.id)
        if trial is not None and trial.began is not None:
            trial.began = now
            self._decide(trial, sequence, now)
            self._close(trial, now)

    def follow(self, sequence: Sequence, tokens: list[int], seconds: float, now: float, alone: bool) -> bool:
        """A round of `seconds` has committed `tokens` and moved the sequence on.

        Returns whether the draft on trial has a node below the new root.
        """
        trial = self.sequences[sequence.id]
        self._rounds += 1
        self._close(trial, now)
        if trial.proposals:
            self._active.add(len(tokens), seconds)
        trial.proposals = [proposal for proposal in trial.proposals if not self._settled(proposal, tokens)]
        speculation = trial.speculation
        speculation.learn(tokens)
        outcome = speculation.advance(tokens, sequence.round, now)
        speculation.estimates.hits.observe(outcome.fan, outcome.guessed)
        trial.until = None
        trial.began = now if trial.compared else None
        if alone and trial.compared:
            self._decide(trial, sequence, now)
        return outcome.hit

    def _decide(self, trial: TrialSequence, sequence: Sequence, now: float) -> None:
        """Let the strategy decide as if this draft were active, unless it has decided for this round."""
        if trial.began is None:
            return
        decision = self._strategy.decide(sequence.view(now, trial.speculation))
        if isinstance(decision, VerifyNodes):
            nodes = frozenset(node.id for node in decision.nodes)
            self._propose(trial, nodes, now - trial.began)
        else:
            trial.until = decision.until

    def _close(self, trial: TrialSequence, now: float) -> None:
        """The round is over while the strategy would still wait: count plain decoding after that wait."""
        if trial.began is not None:
            end = now if trial.until is None else min(now, trial.until)
            self._propose(trial, frozenset(), max(0.0, end - trial.began))

    def _propose(self, trial: TrialSequence, nodes: frozenset[NodeId], waited: float) -> None:
        estimates, root = trial.speculation.estimates, trial.speculation.cache.root
        seconds = estimates.target(1 + len(nodes)) + estimates.hop.get(0.0) + waited
        trial.proposals.append(_Proposal(root.id, nodes, seconds))
        trial.began = trial.until = None

    def _settled(self, proposal: _Proposal, tokens: list[int]) -> bool:
        """Follow the committed `tokens`; whether they show how many nodes the target would have accepted."""
        for token in tokens:
            proposal.tip = node_id(proposal.tip, token)
            if proposal.tip not in proposal.nodes:
                self._challenger.add(proposal.tokens, proposal.seconds)
                return True
            proposal.tokens += 1
        return False
