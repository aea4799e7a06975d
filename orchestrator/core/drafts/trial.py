"""A draft on trial: its tree is never sent, only compared with what the active draft's tree achieved. Pure."""

from dataclasses import dataclass, field

from orchestrator.core.drafts.token_rate import TokenRate
from orchestrator.core.policy.decision import Strategy, VerifyNodes
from orchestrator.core.sequence import Sequence
from orchestrator.core.speculation import Speculation
from protocol.messages.base import NodeId, SequenceId
from protocol.speculation.token_tree import node_id

_ROUNDS = 48
"""Rounds that are compared before the trial has an outcome."""
_MAX_ROUNDS = 4 * _ROUNDS
"""Rounds after which a draft that can't be compared yet (it still prefills) ends its trial, if another draft waits."""


@dataclass(slots=True)
class _Proposal:
    """Nodes that would have been sent. It may take several rounds to see how many of them the target accepts."""

    end: NodeId
    """The last node that is known to be accepted."""
    nodes: frozenset[NodeId]
    seconds: float
    tokens: int = 1


@dataclass(slots=True)
class TrialSequence:
    """One sequence, as it would continue with the draft on trial."""

    speculation: Speculation
    compared: bool
    """Its rounds count. A draft that came up in the middle of a request prefills first, which must not count."""
    began: float | None = None
    """When the present round began; None once the strategy has decided what it would have sent."""
    wait_until: float | None = None
    """The strategy would have waited for growth until then."""
    proposals: list[_Proposal] = field(default_factory=list)


class Trial:
    """The strategy decides each round twice from the same root: with the active draft's tree, and with the tree of the
    draft on trial.

    When the draft on trial becomes active, its trees are used at once.
    """

    def __init__(
        self,
        incarnation: int,
        strategy: Strategy,
        sequences: dict[SequenceId, TrialSequence] | None = None,
        resting: bool = False,
    ) -> None:
        """`incarnation`: that of the draft on trial; `sequences`: what that draft has grown already. `resting`: it
        only follows, while the active one is measured alone."""
        self.incarnation = incarnation
        self.resting = resting
        self.sequences = sequences or {}
        self._strategy = strategy
        self._active_rate, self._trial_rate = TokenRate(), TokenRate()
        self._rounds = 0

    def outcome(self, contested: bool) -> float | None:
        """Decoding speed with the draft on trial relative to the active one; None until it is known.

        `contested`: another draft waits for its trial, so a draft that can't be compared yet ends its trial with 0.
        """
        if self.resting:
            return None
        if self.compared:
            return self._trial_rate.per_second / max(1e-9, self._active_rate.per_second)
        return 0.0 if contested and self._rounds >= _MAX_ROUNDS else None

    @property
    def compared(self) -> bool:
        """The outcome rests on enough rounds of both drafts."""
        return self._trial_rate.rounds >= _ROUNDS

    @property
    def active_rate(self) -> float:
        """Tokens a second with the active draft."""
        return self._active_rate.per_second

    def growth_merged(self, sequence: Sequence, now: float, single: bool) -> None:
        """Growth of the draft on trial was merged; `single`: there is no other request."""
        trial = self.sequences[sequence.id]
        trial.compared = True
        if single and not self.resting:
            self._decide(trial, sequence, now)

    def round_sent(self, sequence: Sequence, now: float) -> None:
        """The target, which serves several requests, began a round with this one: the present tree counts."""
        trial = self.sequences.get(sequence.id)
        if trial is not None and trial.began is not None and not self.resting:
            trial.began = now
            self._decide(trial, sequence, now)
            self._close(trial, now)

    def follow(self, sequence: Sequence, tokens: list[int], seconds: float, now: float, single: bool) -> bool:
        """A round of `seconds` has committed `tokens`. Returns whether the round is a hit for the draft on trial."""
        trial = self.sequences[sequence.id]
        if not self.resting:
            self._compare(trial, tokens, seconds, now)
        settlement = trial.speculation.commit(tokens, sequence.round, now)
        settlement.apply()
        if self.resting:
            return settlement.hit
        trial.wait_until = None
        trial.began = now if trial.compared else None
        if single and trial.compared:
            self._decide(trial, sequence, now)
        return settlement.hit

    def _compare(self, trial: TrialSequence, tokens: list[int], seconds: float, now: float) -> None:
        """Count a round of `seconds` that committed `tokens`, and what the draft on trial would have achieved."""
        self._rounds += 1
        self._close(trial, now)
        if trial.proposals:
            self._active_rate.add(len(tokens), seconds)
        trial.proposals = [proposal for proposal in trial.proposals if not self._measured(proposal, tokens)]

    def _decide(self, trial: TrialSequence, sequence: Sequence, now: float) -> None:
        """Let the strategy decide as if the draft on trial were active, unless it has decided for this round."""
        if trial.began is None:
            return
        decision = self._strategy.decide(sequence.view(now, trial.speculation))
        if isinstance(decision, VerifyNodes):
            nodes = frozenset(node.id for node in decision.nodes)
            self._propose(trial, nodes, now - trial.began)
        else:
            trial.wait_until = decision.until

    def _close(self, trial: TrialSequence, now: float) -> None:
        """The round ended while the strategy would still wait: count plain decoding after that wait."""
        if trial.began is not None:
            end = now if trial.wait_until is None else min(now, trial.wait_until)
            self._propose(trial, frozenset(), max(0.0, end - trial.began))

    def _propose(self, trial: TrialSequence, nodes: frozenset[NodeId], waited: float) -> None:
        estimates, root = trial.speculation.estimates, trial.speculation.tree.root
        seconds = estimates.target(1 + len(nodes)) + estimates.hop.get(0.0) + waited
        trial.proposals.append(_Proposal(root.id, nodes, seconds))
        trial.began = trial.wait_until = None

    def _measured(self, proposal: _Proposal, tokens: list[int]) -> bool:
        """Follow the committed `tokens`. Once they show how many nodes the target would have accepted, count the
        proposal and return True."""
        for token in tokens:
            proposal.end = node_id(proposal.end, token)
            if proposal.end not in proposal.nodes:
                self._trial_rate.add(proposal.tokens, proposal.seconds)
                return True
            proposal.tokens += 1
        return False
