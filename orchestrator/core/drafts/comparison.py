"""Which of two drafts is faster, round by round: first by a trial beside the active one, then each alone. Pure."""

from collections import defaultdict
from dataclasses import dataclass, field

from orchestrator.core.commands import Command, TrialDecided
from orchestrator.core.drafts.election import Election
from orchestrator.core.policy.decision import Strategy, VerifyNodes
from orchestrator.core.sequence import Sequence
from orchestrator.core.speculation import Speculation
from protocol.messages.base import NodeId, SequenceId
from protocol.speculation.token_tree import node_id

_TRIAL_ROUNDS = 48
"""Rounds that are compared before the trial has an outcome."""
_MAX_TRIAL_ROUNDS = 4 * _TRIAL_ROUNDS
"""Rounds after which a draft that can't be compared yet (it still prefills) ends its trial, if another draft waits."""
_ALONE_ROUNDS = 48
"""Settled rounds that measure a draft."""
_FEW_ALONE_ROUNDS = 16
_MAX_ALONE_ROUNDS = 160
_STARTING_ROUNDS = 4
"""Rounds after a change of the draft that do not count: the draft has rested."""
_CLEAR = 2.0
"""A draft that is faster by this factor wins before the other one has settled: turns gain less."""


class Comparison:
    """Tells the election what was measured; the pool then follows the election."""

    def __init__(self, election: Election) -> None:
        self._election = election
        self._alone: AloneRates | None = None
        """While drafts are measured alone."""

    def round_ended(self, sequence: Sequence, trial: "Trial | None", silent: bool) -> list[Command]:
        """A round of this sequence was committed; `silent`: the active draft has owed growth for too long.

        Returns the decision, if this round led to one.
        """
        outcome = None if trial is None else trial.outcome(self._election.contested)
        self._election.round_committed()
        if silent:
            self._election.active_failed()
        elif self._election.alone:
            return self._measure_alone(sequence)
        elif trial is not None and outcome is not None:
            return self._end_trial(trial, outcome)
        return []

    def _end_trial(self, trial: "Trial", outcome: float) -> list[Command]:
        decision = self._election.trial_ended(outcome)
        if decision is None:
            self._alone = AloneRates()
            return []
        measured = trial.active_rate
        return [TrialDecided(decision.winner, decision.loser, measured, measured * outcome)] if trial.compared else []

    def _measure_alone(self, sequence: Sequence) -> list[Command]:
        """Count the round for the active draft, while the one on trial rests."""
        rates = self._alone
        assert rates is not None
        kind = "greedy" if sequence.request.sampling.temperature == 0 else "sampled"
        rates.add(kind, *sequence.ended_round, settled=sequence.speculation.settled)
        if not rates.measuring_incumbent and rates.challenger_known:
            rates.begin_incumbent()
            self._election.change_places()
        elif rates.known:
            challenger = self._election.on_trial
            decision = self._election.measured_alone(rates.challenger / max(1e-9, rates.incumbent))
            winner, loser = rates.incumbent, rates.challenger
            if decision.winner == challenger:
                winner, loser = loser, winner
            return [TrialDecided(decision.winner, decision.loser, winner, loser)]
        return []


@dataclass(slots=True)
class TokenRate:
    """Begins with no rounds."""

    tokens: float = 0.0
    seconds: float = 0.0
    rounds: int = 0

    def add(self, tokens: float, seconds: float) -> None:
        self.tokens += tokens
        self.seconds += seconds
        self.rounds += 1

    @property
    def per_second(self) -> float:
        return self.tokens / max(1e-9, self.seconds)


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
        return 0.0 if contested and self._rounds >= _MAX_TRIAL_ROUNDS else None

    @property
    def compared(self) -> bool:
        """The outcome rests on enough rounds of both drafts."""
        return self._trial_rate.rounds >= _TRIAL_ROUNDS

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


@dataclass(slots=True)
class _Measured:
    """One draft, by the kind of sampling: kinds are not compared with one another."""

    rounds: int = 0
    settled: defaultdict[str, TokenRate] = field(default_factory=lambda: defaultdict(TokenRate))
    all: defaultdict[str, TokenRate] = field(default_factory=lambda: defaultdict(TokenRate))

    def add(self, kind: str, tokens: float, seconds: float, settled: bool) -> None:
        self.rounds += 1
        if self.rounds <= _STARTING_ROUNDS:
            return
        self.all[kind].add(tokens, seconds)
        if settled:
            self.settled[kind].add(tokens, seconds)

    def per_second(self, kind: str) -> float:
        settled = self.settled[kind]
        return (settled if settled.rounds >= _FEW_ALONE_ROUNDS else self.all[kind]).per_second


class AloneRates:
    """The decoding speed with the challenger, then that with the incumbent, each while the other one rests.

    A draft may slow the target down, for instance on the same GPU. While both grow, neither one's effect can be told.
    """

    def __init__(self) -> None:
        self._challenger = _Measured()
        self._incumbent: _Measured | None = None
        self._kind = ""
        """Of the sampling that the comparison is about."""

    def add(self, kind: str, tokens: float, seconds: float, settled: bool) -> None:
        """A round with the draft that is measured now: expected `tokens`, seconds from its root to the next one.

        `settled`: the draft has found out whether it should rest during forwards.
        """
        (self._incumbent or self._challenger).add(kind, tokens, seconds, settled)

    @property
    def challenger_known(self) -> bool:
        """Enough rounds of the challenger are measured: it is the incumbent's turn."""
        return self._enough(self._challenger, max(self._challenger.all, key=self._settled_rounds, default=""))

    def begin_incumbent(self) -> None:
        self._kind = max(self._challenger.all, key=self._settled_rounds)
        self._incumbent = _Measured()

    @property
    def measuring_incumbent(self) -> bool:
        return self._incumbent is not None

    @property
    def known(self) -> bool:
        """Both are measured."""
        incumbent = self._incumbent
        if incumbent is None:
            return False
        clear = incumbent.all[self._kind].rounds >= _FEW_ALONE_ROUNDS and self.challenger > _CLEAR * self.incumbent
        return clear or self._enough(incumbent, self._kind)

    @property
    def challenger(self) -> float:
        """Expected tokens a second."""
        return self._challenger.per_second(self._kind)

    @property
    def incumbent(self) -> float:
        assert self._incumbent is not None
        return self._incumbent.per_second(self._kind)

    def _settled_rounds(self, kind: str) -> tuple[int, int]:
        return self._challenger.settled[kind].rounds, self._challenger.all[kind].rounds

    def _enough(self, measured: _Measured, kind: str) -> bool:
        late = measured.rounds >= _MAX_ALONE_ROUNDS and measured.all[kind].rounds >= _FEW_ALONE_ROUNDS
        return late or measured.settled[kind].rounds >= _ALONE_ROUNDS
