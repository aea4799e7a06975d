"""A draft tried out beside the one that drafts: what it grows is never sent, only weighed. Pure."""

from dataclasses import dataclass, field

from orchestrator.core.policy.decision import Strategy, VerifyNodes
from orchestrator.core.sequence import Sequence
from orchestrator.core.speculation import Speculation
from protocol.messages.base import NodeId, SequenceId
from protocol.speculation.token_tree import node_id

_ROUNDS = 48
_LONGEST = 4 * _ROUNDS
"""Rounds after which a newcomer that can't be compared yet (it still reads the prompt) makes room for another one."""


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
class _Bet:
    """Nodes that the newcomer would have sent; what of them the target accepts may take more than one round to show."""

    tip: NodeId
    """As far as they are known to be accepted."""
    nodes: frozenset[NodeId]
    seconds: float
    tokens: int = 1


@dataclass(slots=True)
class TrialSequence:
    """One sequence as it would go on with the newcomer."""

    speculation: Speculation
    compared: bool
    """What it does counts. One that came in the middle of a request reads the prompt first, once and for all."""
    began: float | None = None
    """When the present round began, until it is clear what the newcomer would have sent."""
    until: float | None = None
    """Growth would have been worth waiting for until then."""
    bets: list[_Bet] = field(default_factory=list)


class Trial:
    """Each round is played twice from the same root: with the nodes that were sent, and with those that the same
    strategy would have sent, had the newcomer drafted. Its trees are ready when it takes over."""

    def __init__(
        self, incarnation: int, strategy: Strategy, shadows: dict[SequenceId, TrialSequence] | None = None
    ) -> None:
        self.incarnation = incarnation
        self.shadows = shadows or {}
        self._strategy = strategy
        self._drafting, self._newcomer = TokenRate(), TokenRate()
        self._rounds = 0

    def outcome(self, contested: bool) -> float | None:
        """How many times as fast decoding would be with the newcomer, once that is known. `contested`: another
        newcomer waits for its turn, so that one that can't be compared yet has to give way."""
        if self._newcomer.rounds >= _ROUNDS:
            return self._newcomer.per_second / max(1e-9, self._drafting.per_second)
        return 0.0 if contested and self._rounds >= _LONGEST else None

    def grew(self, sequence: Sequence, now: float, alone: bool) -> None:
        """The newcomer's growth has been merged."""
        shadow = self.shadows[sequence.id]
        shadow.compared = True
        if alone:
            self._play(shadow, sequence, now)

    def sent(self, sequence: Sequence, now: float) -> None:
        """The target, busy with several requests, turned to this one: the newcomer's nodes of this moment count."""
        shadow = self.shadows.get(sequence.id)
        if shadow is not None and shadow.began is not None:
            shadow.began = now
            self._play(shadow, sequence, now)
            self._close(shadow, sequence, now)

    def follow(self, sequence: Sequence, tokens: list[int], seconds: float, now: float, alone: bool) -> bool:
        """A round of `seconds` has committed `tokens`; the sequence has moved on, its shadow does so here. Returns
        whether the newcomer has something below the new root."""
        shadow = self.shadows[sequence.id]
        self._rounds += 1
        if shadow.began is not None:
            self._close(shadow, sequence, now)
        if shadow.bets:
            self._drafting.add(len(tokens), seconds)
        shadow.bets = [bet for bet in shadow.bets if not self._settle(bet, tokens)]
        speculation = shadow.speculation
        speculation.learn(tokens)
        outcome = speculation.advance(tokens, sequence.round, now)
        speculation.estimates.hits.observe(outcome.fan, outcome.guessed)
        shadow.until = None
        shadow.began = now if shadow.compared else None
        if alone and shadow.compared:
            self._play(shadow, sequence, now)
        return outcome.hit

    def _play(self, shadow: TrialSequence, sequence: Sequence, now: float) -> None:
        """Let the strategy decide as though the newcomer drafted, unless it has for this round."""
        if shadow.began is None:
            return
        decision = self._strategy.decide(sequence.view(now, shadow.speculation))
        if isinstance(decision, VerifyNodes):
            nodes = frozenset(node.id for node in decision.nodes)
            self._bet(shadow, nodes, now - shadow.began)
        else:
            shadow.until = decision.until

    def _close(self, shadow: TrialSequence, sequence: Sequence, now: float) -> None:
        """The round is over and the newcomer would still wait: it counts as plain decoding after that wait."""
        if shadow.began is not None:
            end = now if shadow.until is None else min(now, shadow.until)
            self._bet(shadow, frozenset(), max(0.0, end - shadow.began))

    def _bet(self, shadow: TrialSequence, nodes: frozenset[NodeId], waited: float) -> None:
        estimates, root = shadow.speculation.estimates, shadow.speculation.cache.root
        seconds = estimates.target(1 + len(nodes)) + estimates.hop.get(0.0) + waited
        shadow.bets.append(_Bet(root.id, nodes, seconds))
        shadow.began = shadow.until = None

    def _settle(self, bet: _Bet, tokens: list[int]) -> bool:
        """Follow the committed `tokens`; whether it shows how far the target would have gone."""
        for token in tokens:
            bet.tip = node_id(bet.tip, token)
            if bet.tip not in bet.nodes:
                self._newcomer.add(bet.tokens, bet.seconds)
                return True
            bet.tokens += 1
        return False
