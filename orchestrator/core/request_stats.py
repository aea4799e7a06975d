"""Counts one request's rounds and turns them into its statistics, with what plain decoding would have been. Pure."""

import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from orchestrator.core.expected_rate import ForwardCost
from orchestrator.core.tuning import TUNING
from protocol.messages.client import Pace, Statistics
from protocol.messages.worker import Paced

_MAX_OVERHEADS = 4096
TOLERATED_OVERRUNS = 0.01
"""Share of all forwards. With more overruns the figures are this machine's and not the device's."""


@dataclass(slots=True)
class ForwardSums:
    """Sums over forwards of one width. The share of a forward is the part of it in which the draft computed too."""

    count: int = 0
    seconds: float = 0.0
    share: float = 0.0
    share_squared: float = 0.0
    share_seconds: float = 0.0

    def add(self, seconds: float, share: float) -> None:
        self.count += 1
        self.seconds += seconds
        self.share += share
        self.share_squared += share * share
        self.share_seconds += share * seconds


@dataclass(slots=True)
class RequestStats:
    """Times are seconds on the orchestrator's clock."""

    arrived: float
    prompt_tokens: int
    generated: int = 0
    first_token_at: float | None = None
    last_token_at: float | None = None
    decode_began_at: float | None = None
    rounds: int = 0
    draft_tokens: int = 0
    lookup_tokens: int = 0
    hits: int = 0
    hit_chances: int = 0
    overlapped_rounds: int = 0
    accepted: Counter[int] = field(default_factory=Counter)
    """By depth below the root (1 is the first draft token)."""
    tried: Counter[int] = field(default_factory=Counter)
    """By depth: rounds in which the node above was accepted and had a child under verification."""
    target_seconds: float = 0.0
    draft_seconds: float = 0.0
    evaluated: int = 0
    adopted: int = 0
    """Tokens whose KV the target adopted."""
    prefill_seconds: float = 0.0
    saving_seconds: float = 0.0
    """Of the target, between rounds, on saving KV."""
    paced: Paced = field(default_factory=Paced)
    """What both workers report of keeping to a device's pace."""
    overheads: list[float] = field(default_factory=list)
    forwards: dict[int, ForwardSums] = field(default_factory=dict)
    """By width: the target's forwards for this request alone, without the first one, which is slower."""
    _drafted: float = 0.0
    """`draft_seconds` at the last verdict."""

    def begin_decoding(self, now: float) -> None:
        """The target is ready for the first round: later waits of the target count as decoding."""
        if self.decode_began_at is None:
            self.decode_began_at = now

    def add_round(self, accepted: int, tried: int, seconds: float) -> None:
        """Count a verdict with `accepted` draft tokens, of which at most `tried` could have been accepted."""
        self.rounds += 1
        self.target_seconds += seconds
        self.accepted.update(range(1, accepted + 1))
        self.tried.update(range(1, tried + 1))

    def add_forward(self, width: int, seconds: float, waited: float, counts: bool) -> None:
        """Note a forward for this request alone, after `waited` seconds in which the draft grew. `counts`: it stands
        for the request's conditions."""
        drafted, self._drafted = self.draft_seconds - self._drafted, self.draft_seconds
        if counts and self.rounds:
            share = min(1.0, max(0.0, drafted - waited) / max(1e-9, seconds))
            self.forwards.setdefault(width, ForwardSums()).add(seconds, share)

    def add_growth(self, evaluated: int, seconds: float) -> None:
        """Count nodes that the draft evaluated for this request. Its time counts only while the request is decoded."""
        self.evaluated += evaluated
        if self.decode_began_at is not None:
            self.draft_seconds += seconds

    def add_paced(self, paced: Paced | None) -> None:
        """Count forwards of a paced worker."""
        if paced is not None:
            self.paced += paced

    def add_overhead(self, seconds: float) -> None:
        if len(self.overheads) < _MAX_OVERHEADS:
            self.overheads.append(max(0.0, seconds))

    def add_tokens(self, count: int, now: float) -> None:
        """Count `count` tokens that are emitted to the client."""
        self.generated += count
        self.last_token_at = now
        if self.first_token_at is None:
            self.first_token_at = now

    def statistics(
        self, now: float, drafting: bool, caching: bool, profile: str = "", plain: float | None = None
    ) -> Statistics:
        """The figures so far. `drafting`: the strategy has an acceptance rate; `caching`: it has a hit rate.

        `profile`: name of the device profile that paces the workers, if there is one. `plain`: the estimated tokens a
        second of plain decoding.
        """
        end = self.last_token_at or now
        first = self.first_token_at or now
        decoding = max(1e-9, end - (self.decode_began_at if self.decode_began_at is not None else end))
        accepted, tried = self.accepted.total(), self.tried.total()
        return Statistics(
            prompt_tokens=self.prompt_tokens,
            generated_tokens=self.generated,
            elapsed=end - self.arrived,
            time_to_first_token=first - self.arrived,
            tokens_per_second=self.generated / decoding,
            rounds=self.rounds,
            tokens_per_round=self.generated / self.rounds if self.rounds else 0.0,
            hit_rate=self.hits / self.hit_chances if caching and self.hit_chances else None,
            acceptance_rate=accepted / tried if drafting and tried else None,
            acceptance_by_depth=tuple(self.accepted[depth] / self.tried[depth] for depth in sorted(self.tried)),
            target_busy=min(1.0, self.target_seconds / decoding) if self.rounds else 0.0,
            draft_busy=min(1.0, self.draft_seconds / decoding) if self.rounds else 0.0,
            wasted_draft_share=1.0 - min(1.0, accepted / self.evaluated) if self.evaluated else None,
            overhead_per_round=statistics.median(self.overheads) if self.overheads else 0.0,
            adopted_tokens=self.adopted,
            prefill_seconds=self.prefill_seconds,
            saving_seconds=self.saving_seconds,
            pace=pace_of(profile, self.paced) if profile else None,
            overlapped_rounds=self.overlapped_rounds,
            plain_tokens_per_second=plain,
            draft_tokens=self.draft_tokens,
            lookup_tokens=self.lookup_tokens,
        )


def without_surplus(statistics: Statistics, surplus: int) -> Statistics:
    """The statistics of a request whose last `surplus` tokens a stop string cut off after they were counted."""
    if surplus <= 0:
        return statistics
    generated = max(0, statistics.generated_tokens - surplus)
    share = generated / statistics.generated_tokens
    return msgspec.structs.replace(
        statistics,
        generated_tokens=generated,
        tokens_per_second=share * statistics.tokens_per_second,
        tokens_per_round=share * statistics.tokens_per_round,
    )


def pace_of(profile: str, paced: Paced) -> Pace:
    """How well the forwards kept to the pace of the device profile."""
    return Pace(
        profile=profile,
        forwards=paced.forwards,
        overruns=paced.overruns,
        stretch=paced.excess / paced.seconds if paced.seconds else 0.0,
        valid=paced.overruns <= TOLERATED_OVERRUNS * paced.forwards,
    )


def plain_tokens_per_second(
    forwards: Mapping[int, ForwardSums], cost: ForwardCost, slowdown: float, overhead: float
) -> float:
    """The rate of plain decoding: 1 / (t + overhead).

    t is the time of a forward over one token while the draft rests. It is fitted to the forwards that the request had:

        seconds = t p(w) (1 + k share)

    * p(w) = cost(w) / cost(1), so forwards of one token count as they are and wider ones are scaled.
    * k, at least 0, is the slow-down by a draft that shares cores, memory or a GPU with the target: plain decoding has
      no draft. It is the slope of a least-squares line, pulled to `slowdown`, which was measured before, or is 0.

    Without forwards, t = cost(1) / (1 + slowdown). `forwards`: by width. `cost`: of forwards beside a growing draft.
    `overhead`: seconds of a round outside the forward.
    """
    count = sum(one.count for one in forwards.values())
    if not count:
        return 1.0 / max(1e-9, cost(1) / (1.0 + slowdown) + overhead)
    scale = {width: cost(1) / max(1e-9, cost(width)) for width in forwards}
    share = sum(one.share for one in forwards.values()) / count
    seconds = sum(scale[width] * one.seconds for width, one in forwards.items()) / count
    spread = sum(one.share_squared for one in forwards.values()) - count * share * share
    covariance = sum(scale[width] * one.share_seconds for width, one in forwards.items()) - count * share * seconds
    resting = seconds / (1.0 + slowdown * share)
    trust = TUNING.slowdown_trust
    slope = max(0.0, (covariance + trust * slowdown * resting) / (max(0.0, spread) + trust))
    return 1.0 / max(1e-9, max(seconds / TUNING.slowdown_most, seconds - slope * share) + overhead)
