"""How often and how surely a draft guesses right: a family with few parameters, and a language of it. Pure."""

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import NormalDist

from orchestrator.tools.simulate.language import made_up, uniform
from protocol.messages.base import NodeId
from protocol.speculation.candidates import Candidates

_TOKEN, _EASE, _RANK, _OTHER, _PROMPT = range(5)
"""Streams of noise."""
_SURELY = 1e-9
_STEPS = [NormalDist().inv_cdf((index + 0.5) / 257) for index in range(257)]
"""A normal distribution as equally likely values."""
_LOG_FAR = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceModel:
    """The draft's k-th best guess is the target's token with a probability that falls as a power of k.

    P(rank > k) = (1 + c_t k)^-r, with c_t such that the best guess is right with a_t: geometric in
    depth, a power law in breadth, and convex, so that no guess is better than the one before. a_t
    varies with the position: its log odds are normal, the same for `passage` positions in a row, and
    its mean over positions is `accept`.
    """

    accept: float
    """a: the best guess is right, in [0, 1]."""
    exponent: float = 1.0
    """r > 0."""
    spread: float = 0.0
    """Standard deviation of the log odds of a_t; 0 makes all positions alike."""
    passage: int = 1
    """Positions in a row that are equally easy."""
    claim_slope: float = 1.0
    """Log odds of the first guess's claim = slope * log odds of a_t + shift; over 1 is over-confident."""
    claim_shift: float = 0.0
    independent: float | None = None
    """Probability that two independent draws agree, sum(p q); None: as `accept`, which is so at temperature 0."""

    def by_ease(self) -> list[float]:
        """a_t of equally frequent kinds of positions, the hardest first."""
        if self.spread == 0.0 or not _SURELY < self.accept < 1.0 - _SURELY:
            return [self.accept]
        center = self._center()
        return [from_odds(center + self.spread * step) for step in _STEPS]

    def claims(self, accept: float, count: int) -> list[float]:
        """What the draft claims of its `count` best guesses where its best is right with `accept`, in [0, 1]."""
        first = from_odds(self.claim_slope * to_odds(accept) + self.claim_shift)
        beyond = [self.beyond(rank, first) for rank in range(count + 1)]
        return [before - after for before, after in pairwise(beyond)]

    def beyond(self, rank: int, accept: float) -> float:
        """P(rank of the right guess > `rank`) where the best guess is right with `accept`."""
        if rank == 0:
            return 1.0
        return 0.0 if accept >= 1.0 else (1.0 + self._steepness(accept) * rank) ** -self.exponent

    def rank(self, accept: float, quantile: float) -> float:
        """Which guess is right, counted from 1; infinite where none is. `quantile` strictly inside (0, 1)."""
        if quantile < accept:
            return 1.0
        steepness = self._steepness(accept)
        log_beyond = -math.log1p(-quantile) / self.exponent
        if steepness == 0.0 or log_beyond > _LOG_FAR:
            return math.inf
        return max(2.0, math.ceil(math.expm1(log_beyond) / steepness))

    def _steepness(self, accept: float) -> float:
        """c of P(rank > k) = (1 + c k)^-r; grows with `accept`, 0 for 0."""
        return math.expm1(min(_LOG_FAR, -math.log1p(-min(accept, 1.0 - _SURELY)) / self.exponent))

    def _center(self) -> float:
        """The mean of normal log odds at which the mean probability is `accept`."""
        low, high = -40.0, 40.0
        for _ in range(50):
            middle = (low + high) / 2
            mean = sum(from_odds(middle + self.spread * step) for step in _STEPS) / len(_STEPS)
            low, high = (middle, high) if mean < self.accept else (low, middle)
        return (low + high) / 2


@dataclass(frozen=True)
class InventedLanguage:
    """Tokens without meaning or repetition, guessed as `acceptance` says."""

    acceptance: AcceptanceModel
    seed: int = 0
    prompt_tokens: int = 128
    draft: tuple[int, ...] = ()
    """Which draft guesses: what one of them finds hard, another one need not."""

    def prompt(self, request: int) -> tuple[int, ...]:
        return tuple(made_up(self.seed, request, _PROMPT, position) for position in range(self.prompt_tokens))

    def token(self, request: int, position: int) -> int:
        return made_up(self.seed, request, _TOKEN, position)

    def candidates(self, request: int, node: NodeId, position: int, on_truth: bool, limit: int) -> Candidates:
        accept = self.accept_at(request, position) if on_truth else self._accept_off(node)
        right = self.rank_at(request, position, accept) if on_truth else math.inf
        tokens = [
            self.token(request, position) if rank == right else made_up(node, _OTHER, rank)
            for rank in range(1, limit + 1)
        ]
        return Candidates(tokens, self.acceptance.claims(accept, limit))

    def accept_at(self, request: int, position: int) -> float:
        """a_t on the target's own path."""
        return self._accept(self.seed, request, _EASE, position // self.acceptance.passage)

    def rank_at(self, request: int, position: int, accept: float) -> float:
        """Which of the draft's guesses is the target's token."""
        return self.acceptance.rank(accept, uniform(self.seed, request, _RANK, position, *self.draft))

    def _accept_off(self, node: NodeId) -> float:
        return self._accept(node, _EASE)

    def _accept(self, *key: int) -> float:
        return self._by_ease[int(uniform(*key) * len(self._by_ease))]

    @cached_property
    def _by_ease(self) -> list[float]:
        return self.acceptance.by_ease()


def to_odds(probability: float) -> float:
    """Log odds, finite for 0 and 1 too."""
    inside = min(max(probability, _SURELY), 1.0 - _SURELY)
    return math.log(inside / (1.0 - inside))


def from_odds(odds: float) -> float:
    """The probability with these log odds."""
    return 1.0 / (1.0 + math.exp(-max(-700.0, min(700.0, odds))))
