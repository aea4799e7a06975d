"""Two ways of doing the same: the other one is tried now and then, and stays if it is faster. Pure.

`Tries` is the mechanism: try the other way, keep it if it is better, double the pause if it is not. `TurnTaking` and
`Freshness` use it (`estimates.py`), and the election of drafts (`orchestrator/core/drafts/election.py`).
"""

from collections import Counter, defaultdict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

_OUTLIER = 4.0
"""A round counts as at most this many mean rounds: a stall says nothing about a way."""


@dataclass(slots=True)
class Pause:
    """Rounds until something is tried again: `first`, twice as many after each try that failed, at most `longest`."""

    first: int
    longest: int
    rounds: int = 0

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """A try has succeeded."""
        self.rounds = self.first

    def double(self) -> None:
        """A try has failed."""
        self.rounds = min(2 * self.rounds, self.longest)


@dataclass(slots=True)
class Rate:
    """Tokens a second, over a decaying window of rounds."""

    window: int
    rounds: int = 0
    _tokens: float = 0.0
    _seconds: float = 0.0

    def add(self, tokens: float, seconds: float) -> None:
        if self.rounds:
            seconds = min(seconds, _OUTLIER * self._seconds)
        self.rounds += 1
        share = 1.0 / min(self.rounds, self.window)
        self._tokens += share * (tokens - self._tokens)
        self._seconds += share * (seconds - self._seconds)

    @property
    def per_second(self) -> float:
        return self._tokens / max(1e-9, self._seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Of the tries of one choice. All counts are rounds."""

    first_pause: int
    longest_pause: int
    rounds: int
    """Of a try."""
    in_a_row: int
    """So many of them follow one another; then there is a pause before the next ones."""
    window: int
    """Of the rates. If it is longer than a try, a try goes on with what the one before has measured."""
    gain: float
    """The other way must be faster by this factor: rates of short tries are uncertain."""
    settling: int = 0
    """Rounds after a change that count for neither way."""
    few: int = 4
    loss: float = 0.0
    """A try that is slower by this factor after a `few` rounds ends."""
    most: int = 1 << 30
    """After so many rounds, of whatever kind, a try ends."""


class Outcome(NamedTuple):
    """The end of a try."""

    kept: bool
    """The other way has become the usual one."""
    usual: float
    """Tokens a second by the way that was the usual one."""
    tried: float
    """Tokens a second by the other way."""


class Tries:
    """Measures the usual way, and the other one while it is tried."""

    def __init__(self, terms: Terms, way: bool = False) -> None:
        """`way`: the usual one."""
        self.way = way
        """What to do now."""
        self._terms = terms
        self._pause = Pause(terms.first_pause, terms.longest_pause)
        self._usual = way
        self._rates = {each: self._unmeasured() for each in (False, True)}
        self._rounds = 0
        """Since the way has changed."""
        self._tried: Counter[Hashable] = Counter()
        """Rounds of the present try, by their kind."""
        self._settling = 0

    @property
    def trying(self) -> bool:
        """The other way has its turn."""
        return self.way != self._usual

    @property
    def settling(self) -> bool:
        """The next round counts for neither way."""
        return self._settling > 0

    @property
    def due(self) -> bool:
        """The pause is over."""
        return not self.trying and self._rounds >= self._pause.rounds

    def measured(self, kind: Hashable) -> bool:
        """The usual way was measured in as many rounds of this kind as a try has."""
        return self._rates[self._usual][kind].rounds >= self._terms.rounds

    def begin(self) -> None:
        """Try the other way from the next round on."""
        if not self._tried and self._terms.window <= self._terms.rounds:
            self._rates[not self._usual] = self._unmeasured()
        self._change()

    def observe(
        self, tokens: float, seconds: float, kind: Hashable = None, way: bool | None = None, hopeless: bool = False
    ) -> Outcome | None:
        """A round gave `tokens` and took `seconds`. Returns how the present try ended, if it did with this round.

        `kind`: rounds of different kinds are not compared with one another. `way`: of this round, if it was not the
        present one. `hopeless`: whatever the rates say, the other way will not do.
        """
        way = self.way if way is None else way
        if self._settling:
            self._settling -= 1
            return None
        self._rates[way][kind].add(tokens, seconds)
        if way != self.way:
            return None
        self._rounds += 1
        return self._judge(kind, hopeless) if self.trying else None

    def failed(self) -> None:
        """What would have been tried is known to be slower."""
        self._pause.double()
        self._rounds = 0

    def restart(self) -> None:
        """One of the two ways is another one now: the usual way is what is done at present, and nothing is measured."""
        self._usual = self.way
        self._rates = {each: self._unmeasured() for each in (False, True)}
        self._tried.clear()
        self._rounds, self._settling = 0, self._terms.settling

    def _judge(self, kind: Hashable, hopeless: bool) -> Outcome | None:
        terms, usual, tried = self._terms, self._rates[self._usual][kind], self._rates[self.way][kind]
        self._tried[kind] += 1
        known = usual.rounds >= terms.few
        clear = known and tried.rounds >= terms.few and tried.per_second < terms.loss * usual.per_second
        late = self._tried.total() >= terms.most
        if hopeless or clear or late or (known and self._tried[kind] >= terms.rounds):
            kept = known and not hopeless and not clear and tried.per_second > terms.gain * usual.per_second
            self._end(kept)
            return Outcome(kept, usual.per_second, tried.per_second)
        if self._rounds >= terms.in_a_row:
            self._change()
        return None

    def _end(self, kept: bool) -> None:
        self._tried.clear()
        if kept:
            self._usual = self.way
            self._pause.reset()
            self._rounds = 0
        else:
            self._change()
            self._pause.double()

    def _change(self) -> None:
        self.way = not self.way
        self._rounds, self._settling = 0, self._terms.settling

    def _unmeasured(self) -> defaultdict[Hashable, Rate]:
        return defaultdict(lambda: Rate(self._terms.window))
