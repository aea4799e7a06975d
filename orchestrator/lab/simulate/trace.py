"""A recorded run: a real draft's guesses and a real target's tokens, as a language, and the model that fits them."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import mean, pstdev

from orchestrator.core.events import Arrived, Request, Submitted
from orchestrator.lab.simulate.acceptance import AcceptanceModel, from_log_odds, to_log_odds
from orchestrator.lab.simulate.language import random_token, uniform
from orchestrator.runtime.recording import replay
from protocol.errors import InputError
from protocol.messages.base import NodeId, SequenceId
from protocol.messages.worker import Grow, Verdict
from protocol.speculation.candidates import Candidates
from protocol.speculation.token_tree import node_id

_SUBSTITUTE, _OTHER, _BEYOND = range(5, 8)
"""Streams of random numbers, different from those of invented languages."""


@dataclass(frozen=True, slots=True)
class TracedPosition:
    """One generated token, and the draft's guesses for it."""

    token: int
    candidates: Candidates | None
    """None if the verdict came before the draft's guesses."""

    @property
    def rank(self) -> int | None:
        """Rank of the right guess, from 1; None if no guess was right or none is known."""
        if self.candidates is None or self.token not in self.candidates.tokens:
            return None
        return self.candidates.tokens.index(self.token) + 1


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """One request of a recorded run."""

    prompt: tuple[int, ...]
    temperature: float
    positions: tuple[TracedPosition, ...]


def read_trace(path: Path) -> list[RecordedRequest]:
    """The requests with coupled verification of a `--record` file. Raises InputError if it holds no draft's guesses."""
    readers: dict[SequenceId, _TraceReader] = {}
    try:
        for event, _ in replay(path):
            match event:
                case Submitted(sequence, request):
                    readers[sequence] = _TraceReader(request)
                case Arrived("draft", _, Grow() as growth) if growth.sequence in readers:
                    readers[growth.sequence].grow(growth)
                case Arrived("target", _, Verdict() as verdict) if verdict.sequence in readers:
                    readers[verdict.sequence].add_verdict(verdict)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is no recorded run ({error}): write one with `generate --record FILE`.") from error
    recorded = [reader.recorded() for reader in readers.values() if reader.usable]
    if not any(position.candidates is not None for one in recorded for position in one.positions):
        raise InputError(
            f"{path} holds no guesses of a draft: record a run with a draft, coupled verification and "
            "`--strategy adaptive`, the default."
        )
    return recorded


def coverage(recorded: Iterable[RecordedRequest]) -> float:
    """Share of generated tokens for which the draft's guesses are known."""
    known = [position.candidates is not None for one in recorded for position in one.positions]
    return sum(known) / max(1, len(known))


class ReplayedLanguage:
    """Request i is the i-th recorded one. Tokens, prompts and guesses on the target's path are the recorded ones.

    Off that path, and where the guesses were not recorded, the guesses of another recorded position are used, chosen
    by seed, with random tokens in place of those that were not the target's.
    """

    def __init__(self, recorded: Sequence[RecordedRequest], seed: int = 0) -> None:
        self._recorded = recorded
        self._seed = seed

    def prompt(self, request: int) -> tuple[int, ...]:
        return self._recorded[request].prompt

    def token(self, request: int, position: int) -> int:
        known = self._position(request, position)
        return random_token(self._seed, request, _BEYOND, position) if known is None else known.token

    def candidates(self, request: int, node: NodeId, position: int, on_target_path: bool, limit: int) -> Candidates:
        known = self._position(request, position) if on_target_path else None
        if known is not None and known.candidates is not None:
            return Candidates(known.candidates.tokens[:limit], known.candidates.probabilities[:limit])
        substitute, claims = self._known[int(uniform(self._seed, node, _SUBSTITUTE) * len(self._known))]
        right = substitute.rank if on_target_path else None
        tokens = [
            self.token(request, position) if rank == right else random_token(node, _OTHER, rank)
            for rank in range(1, len(claims[:limit]) + 1)
        ]
        return Candidates(tokens, claims[:limit])

    def _position(self, request: int, position: int) -> TracedPosition | None:
        """None beyond the end of the recording."""
        one = self._recorded[request]
        index = position - len(one.prompt)
        return one.positions[index] if 0 <= index < len(one.positions) else None

    @cached_property
    def _known(self) -> list[tuple[TracedPosition, Sequence[float]]]:
        """Positions with known guesses, and the claimed probabilities."""
        return [
            (position, position.candidates.probabilities)
            for one in self._recorded
            for position in one.positions
            if position.candidates is not None
        ]


class _TraceReader:
    """Follows one sequence through its messages by node ids."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._root = node_id(NodeId(0), request.tokens[-1])
        self._round = 0
        self._guesses: dict[NodeId, dict[int, float]] = {}
        self._tokens: list[int] = []
        self._ids = [self._root]
        """Of the first root and of every generated token."""

    @property
    def usable(self) -> bool:
        return self._request.sampling.verification == "coupled" and bool(self._tokens)

    def grow(self, growth: Grow) -> None:
        for parent, token, claim in zip(growth.parents, growth.tokens, growth.probabilities, strict=True):
            self._guesses.setdefault(parent, {}).setdefault(token, claim)

    def add_verdict(self, verdict: Verdict) -> None:
        if verdict.round != self._round:
            return
        tokens: list[int] = []
        for id in verdict.path:
            token = self._token(self._ids[-1] if not tokens else self._after(tokens), id)
            if token is None:
                return
            tokens.append(token)
        self._round += 1
        for token in [*tokens, verdict.bonus]:
            self._tokens.append(token)
            self._ids.append(node_id(self._ids[-1], token))

    def recorded(self) -> RecordedRequest:
        count = min(len(self._tokens), self._request.max_tokens)
        pairs = zip(self._tokens[:count], self._ids, strict=False)
        positions = tuple(TracedPosition(token, self._known(parent)) for token, parent in pairs)
        return RecordedRequest(self._request.tokens, self._request.sampling.temperature, positions)

    def _after(self, tokens: Iterable[int]) -> NodeId:
        id = self._ids[-1]
        for token in tokens:
            id = node_id(id, token)
        return id

    def _token(self, parent: NodeId, id: NodeId) -> int | None:
        """The token that makes `id` a child of `parent`: a guess of the draft, or of prompt lookup, which repeats
        earlier tokens."""
        seen = (self._guesses.get(parent, {}), set(self._request.tokens), set(self._tokens))
        return next((token for tokens in seen for token in tokens if node_id(parent, token) == id), None)

    def _known(self, parent: NodeId) -> Candidates | None:
        found = self._guesses.get(parent)
        return None if found is None else Candidates(tuple(found), tuple(found.values()))


_NEWTON_STEPS = 25
_RIDGE = 1.0
"""Pseudo-observations of well-calibrated claims, which stabilise the fit with few positions."""
_MAX_PASSAGE = 16
_EXPONENTS = [0.1 * 1.08**step for step in range(61)]
"""Candidates for r: 0.1 to 10 in steps of 8%."""


def fit(recorded: Sequence[RecordedRequest], independent: float | None = None) -> AcceptanceModel:
    """The model of the positions with known guesses. There must be at least one."""
    runs = [[position for position in one.positions if position.candidates is not None] for one in recorded]
    known = [position for run in runs for position in run]
    slope, shift = _odds_of_claims(known)
    return AcceptanceModel(
        accept=mean(position.rank == 1 for position in known),
        exponent=_exponent(known, slope, shift),
        spread=slope * pstdev(_claimed_odds(position) for position in known),
        passage=_passage(runs),
        # The fit maps claims to acceptance; the model needs the inverse.
        claim_slope=1.0 / slope,
        claim_shift=-shift / slope,
        independent=independent,
    )


def _claimed_odds(position: TracedPosition) -> float:
    assert position.candidates is not None
    return to_log_odds(min(max(position.candidates.probabilities[0], 1e-4), 1.0 - 1e-4))


def _odds_of_claims(known: Sequence[TracedPosition]) -> tuple[float, float]:
    """Slope and shift of log odds of being right by claimed log odds: logistic regression by Newton's method."""
    points = [(_claimed_odds(position), float(position.rank == 1)) for position in known]
    slope, shift = 1.0, 0.0
    for _ in range(_NEWTON_STEPS):
        a, b, c = _RIDGE, 0.0, _RIDGE
        toward_slope, toward_shift = -_RIDGE * (slope - 1.0), -_RIDGE * shift
        for odds, right in points:
            expected = 1.0 / (1.0 + math.exp(-(slope * odds + shift)))
            weight = expected * (1.0 - expected)
            a, b, c = a + weight * odds * odds, b + weight * odds, c + weight
            toward_slope += (right - expected) * odds
            toward_shift += right - expected
        scale = a * c - b * b
        slope += (c * toward_slope - b * toward_shift) / scale
        shift += (a * toward_shift - b * toward_slope) / scale
    return max(slope, 0.05), shift


def _exponent(known: Sequence[TracedPosition], slope: float, shift: float) -> float:
    """The r that maximises the likelihood of the ranks of right guesses that were not the first."""
    missed = [
        (position.rank, len(position.candidates.tokens), from_log_odds(slope * _claimed_odds(position) + shift))
        for position in known
        if position.candidates is not None and position.rank != 1
    ]
    return max(_EXPONENTS, key=lambda exponent: _log_likelihood(missed, exponent))


def _log_likelihood(missed: Sequence[tuple[int | None, int, float]], exponent: float) -> float:
    """Of (rank, number of guesses, probability of the first guess); rank None: no guess was right."""
    law = AcceptanceModel(accept=0.5, exponent=exponent)
    # Two pseudo-observations, so that a run without misses has a maximum.
    total = 0.0
    for rank, count, accept in [*missed, (2, 2, 0.5), (None, 2, 0.5)]:
        chance = law.beyond(count, accept) if rank is None else law.beyond(rank - 1, accept) - law.beyond(rank, accept)
        total += math.log(max(chance, 1e-12) / max(law.beyond(1, accept), 1e-12))
    return total


def _passage(runs: Sequence[Sequence[TracedPosition]]) -> int:
    """The passage length whose correlation of neighbouring claims equals the observed one."""
    pairs = [(_claimed_odds(one), _claimed_odds(next)) for run in runs for one, next in pairwise(run)]
    if len(pairs) < 2:
        return 1
    center = mean(one for one, _ in pairs)
    variance = mean((one - center) ** 2 for one, _ in pairs)
    together = mean((one - center) * (next - center) for one, next in pairs)
    correlation = together / variance if variance > 0 else 0.0
    return max(1, min(_MAX_PASSAGE, round(1.0 / max(1e-3, 1.0 - correlation))))
