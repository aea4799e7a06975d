"""The tokens of a modelled target and the guesses of a modelled draft: the interface, stateless noise, and a model of
the guesses and of their claimed probabilities. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import NormalDist
from typing import Protocol

from protocol.messages.base import NodeId
from protocol.speculation.token_tree import Candidates, node_id

VOCABULARY = 1 << 20
"""The largest vocabulary of a worker: random tokens hardly ever repeat, so that prompt lookup finds nothing."""


class Language(Protocol):
    """Deterministic: equal arguments give equal results.

    A request is identified by its number, which is the seed of its sampling.
    """

    def prompt(self, request: int) -> tuple[int, ...]: ...

    def token(self, request: int, position: int) -> int:
        """The target's token at this absolute position."""
        ...

    def candidates(self, request: int, node: NodeId, position: int, on_target_path: bool, limit: int) -> Candidates:
        """At most `limit` guesses of the token at `position`, below this node, by falling claimed probability.

        `on_target_path`: the path to the node consists of the target's tokens, so that a guess can be right.
        """
        ...


def uniform(*key: int) -> float:
    """A number strictly inside (0, 1), a function of `key` alone."""
    return ((_mixed(key) >> 10) + 0.5) / (1 << 53)


def random_token(*key: int) -> int:
    """A token of the invented vocabulary, a function of `key` alone."""
    return _mixed(key) % VOCABULARY


def _mixed(key: Sequence[int]) -> int:
    mixed = NodeId(len(key))
    for part in key:
        mixed = node_id(mixed, part)
    # A second round: after one round the high bits of neighbouring keys are alike.
    return node_id(mixed, 1)


_TOKEN, _DIFFICULTY, _RANK, _OTHER, _PROMPT = range(5)
"""Streams of random numbers."""
_EPSILON = 1e-9
_STEPS = [NormalDist().inv_cdf((index + 0.5) / 257) for index in range(257)]
"""Equally likely values of a normal distribution."""
_MAX_LOG = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceModel:
    """The draft's k-th best guess is the target's token with a probability that falls as a power of k.

    P(rank > k) = (1 + c_t k)^-r. c_t is such that the best guess is right with probability a_t. This is geometric in
    depth, a power law in breadth, and convex: no guess is better than the one before. a_t depends on the position: its
    log odds are normally distributed, and its mean is `accept`.
    """

    accept: float
    """a: probability that the best guess is right, in [0, 1]."""
    exponent: float = 1.0
    """r > 0."""
    spread: float = 0.0
    """Standard deviation of the log odds of a_t; 0: all positions are equally difficult."""
    claim_slope: float = 1.0
    """Log odds of the first guess's claim = slope * log odds of a_t + shift; above 1 the draft is over-confident."""
    claim_shift: float = 0.0
    independent: float | None = None
    """Probability that two independent draws agree, sum(p q); None: equal to `accept`, as at temperature 0."""

    def by_difficulty(self) -> list[float]:
        """a_t of equally frequent kinds of positions, the most difficult first."""
        if self.spread == 0.0 or not _EPSILON < self.accept < 1.0 - _EPSILON:
            return [self.accept]
        center = self._center()
        return [from_log_odds(center + self.spread * step) for step in _STEPS]

    def claims(self, accept: float, count: int) -> list[float]:
        """Claimed probabilities of the `count` best guesses at a position whose a_t is `accept`, in [0, 1]."""
        first = from_log_odds(self.claim_slope * to_log_odds(accept) + self.claim_shift)
        beyond = [self.beyond(rank, first) for rank in range(count + 1)]
        return [before - after for before, after in pairwise(beyond)]

    def beyond(self, rank: int, accept: float) -> float:
        """P(rank of the right guess > `rank`) at a position whose a_t is `accept`."""
        if rank == 0:
            return 1.0
        return 0.0 if accept >= 1.0 else (1.0 + self._steepness(accept) * rank) ** -self.exponent

    def rank(self, accept: float, quantile: float) -> float:
        """Rank of the right guess, from 1; infinite if none is right. `quantile`: strictly inside (0, 1)."""
        if quantile < accept:
            return 1.0
        steepness = self._steepness(accept)
        log_beyond = -math.log1p(-quantile) / self.exponent
        if steepness == 0.0 or log_beyond > _MAX_LOG:
            return math.inf
        return max(2.0, math.ceil(math.expm1(log_beyond) / steepness))

    def _steepness(self, accept: float) -> float:
        """c of P(rank > k) = (1 + c k)^-r; grows with `accept`, 0 for 0."""
        return math.expm1(min(_MAX_LOG, -math.log1p(-min(accept, 1.0 - _EPSILON)) / self.exponent))

    def _center(self) -> float:
        """The mean of the normal log odds for which the mean probability is `accept`."""
        low, high = -40.0, 40.0
        for _ in range(50):
            middle = (low + high) / 2
            mean = sum(from_log_odds(middle + self.spread * step) for step in _STEPS) / len(_STEPS)
            low, high = (middle, high) if mean < self.accept else (low, middle)
        return (low + high) / 2


@dataclass(frozen=True)
class ModelledLanguage:
    """Random tokens without repetition. A draft's guesses follow `acceptance`."""

    acceptance: AcceptanceModel
    seed: int = 0
    prompt_tokens: int = 128
    draft: tuple[int, ...] = ()
    """Identifies the draft: different drafts find different positions difficult."""

    def prompt(self, request: int) -> tuple[int, ...]:
        return tuple(random_token(self.seed, request, _PROMPT, position) for position in range(self.prompt_tokens))

    def token(self, request: int, position: int) -> int:
        return random_token(self.seed, request, _TOKEN, position)

    def candidates(self, request: int, node: NodeId, position: int, on_target_path: bool, limit: int) -> Candidates:
        accept = self.accept_at(request, position) if on_target_path else self._accept(node, _DIFFICULTY)
        right = self.rank_at(request, position, accept) if on_target_path else math.inf
        tokens = [
            self.token(request, position) if rank == right else random_token(node, _OTHER, rank)
            for rank in range(1, limit + 1)
        ]
        return Candidates(tokens, self.acceptance.claims(accept, limit))

    def accept_at(self, request: int, position: int) -> float:
        """a_t of a position on the target's path."""
        return self._accept(self.seed, request, _DIFFICULTY, position)

    def rank_at(self, request: int, position: int, accept: float) -> float:
        """Rank of the target's token among the draft's guesses."""
        return self.acceptance.rank(accept, uniform(self.seed, request, _RANK, position, *self.draft))

    def _accept(self, *key: int) -> float:
        return self._by_difficulty[int(uniform(*key) * len(self._by_difficulty))]

    @cached_property
    def _by_difficulty(self) -> list[float]:
        return self.acceptance.by_difficulty()


def to_log_odds(probability: float) -> float:
    """Log odds; finite for 0 and 1 too."""
    inside = min(max(probability, _EPSILON), 1.0 - _EPSILON)
    return math.log(inside / (1.0 - inside))


def from_log_odds(odds: float) -> float:
    """The probability with these log odds."""
    return 1.0 / (1.0 + math.exp(-max(-700.0, min(700.0, odds))))
