"""Two drafts measured one after the other, each alone while the other one rests. Pure.

A draft may slow the target down, for instance on the same GPU. While both grow, neither one's effect can be told.
"""

from collections import defaultdict
from dataclasses import dataclass, field

from orchestrator.core.drafts.token_rate import TokenRate

_ROUNDS = 48
"""Settled rounds that measure a draft."""
_FEW_ROUNDS = 16
_MAX_ROUNDS = 160
_STARTING_ROUNDS = 4
"""Rounds after a change of the draft that do not count: the draft has rested."""
_CLEAR = 2.0
"""A draft that is faster by this factor wins before the other one has settled: turns gain less."""


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
        return (settled if settled.rounds >= _FEW_ROUNDS else self.all[kind]).per_second


class AloneRates:
    """The decoding speed with the challenger, then that with the incumbent."""

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
        clear = incumbent.all[self._kind].rounds >= _FEW_ROUNDS and self.challenger > _CLEAR * self.incumbent
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
        late = measured.rounds >= _MAX_ROUNDS and measured.all[kind].rounds >= _FEW_ROUNDS
        return late or measured.settled[kind].rounds >= _ROUNDS
