"""How often a drafter's guesses are right on held-out text, by depth."""

from collections import defaultdict
from collections.abc import Iterable

import mlx.core as mx
import numpy as np

from draft_worker.training.language import NO_PLACE, Judge, LanguageTraining
from draft_worker.training.rows import Row
from draft_worker.training.target import Target
from protocol.contracts.training import DEPTHS, HeldOut, HeldOutAcceptance


class Examiner:
    """Knows the target's tokens, and the noise with which the target chose them."""

    def __init__(self, target: Target, head_tokens: np.ndarray, seed: int = 5) -> None:
        self._head = target.head()
        self._tokens = head_tokens
        self._index = np.full(target.vocabulary, -1, np.int64)
        self._index[head_tokens] = np.arange(len(head_tokens))
        self._seed = seed

    def report(self, training: LanguageTraining, rows: Iterable[Row]) -> HeldOut:
        found = defaultdict(list)
        for number, row in enumerate(rows):
            places = np.flatnonzero(row.wanted)
            if len(places):
                judge = self._judge(row, places, np.random.default_rng([self._seed, number]))
                found[row.temperature].append(training.hits(row, places, judge))
        return HeldOut(
            acceptance=tuple(acceptance(each, np.concatenate(found[each])) for each in sorted(found)),
            parameters_per_guess=training.parameters_per_guess,
        )

    def _judge(self, row: Row, places: np.ndarray, random: np.random.Generator) -> Judge:
        """Coupled sampling: drafter and target add the same noise, so that the better guess is right more often."""
        chosen = self._index[row.tokens[places + 1]]
        at = np.full(len(row.tokens), -1)
        at[places] = np.arange(len(places))
        noise = self._noise(row, places, chosen, random) if row.temperature else None

        def judge(slots: np.ndarray, logits: mx.array) -> np.ndarray:
            here = at[slots]
            scores = np.array(logits.astype(mx.float32))
            if noise is not None:
                scores = scores / row.temperature + noise[here]
            return scores.argmax(-1) == chosen[here]

        return judge

    def _noise(self, row: Row, places: np.ndarray, chosen: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """(places, head) Gumbel noise, drawn given that the target chose its token with it."""
        logits = mx.array(row.states[places]) @ self._head.T / row.temperature
        highest = np.array(mx.logsumexp(logits, axis=-1))
        return posterior_noise(np.array(logits[:, mx.array(self._tokens)]), highest, chosen, random)


def posterior_noise(
    logits: np.ndarray, normaliser: np.ndarray, chosen: np.ndarray, random: np.random.Generator
) -> np.ndarray:
    """(n, head) Gumbel noise under which `chosen` (n,) wins among all tokens; -1: a token that is not in the head wins.

    `normaliser` (n,): log of the sum of exponentials over all tokens. The winner's score is a Gumbel variable at the
    normaliser, and independent of who wins; the others' are truncated at it (Maddison et al. 2014, A* sampling, 3.2).
    """
    best = normaliser + random.gumbel(size=normaliser.shape)
    free = logits + random.gumbel(size=logits.shape)
    scores = -np.logaddexp(-best[:, None], -free)
    inside = np.flatnonzero(chosen >= 0)
    scores[inside, chosen[inside]] = best[inside]
    return (scores - logits).astype(np.float32)


def acceptance(temperature: float, hits: np.ndarray) -> HeldOutAcceptance:
    """Of (places, DEPTHS) hits, as `LanguageTraining.hits` gives them."""
    rates = tuple(_conditional(hits[:, : depth + 1]) for depth in range(DEPTHS))
    return HeldOutAcceptance(temperature, len(hits), rates)


def _conditional(hits: np.ndarray) -> float | None:
    """(places, depths): the share of right last guesses where all in front are right."""
    reached = (hits[:, :-1] == 1).all(1) & (hits[:, -1] != NO_PLACE)
    return round(float(hits[reached, -1].mean()), 4) if reached.any() else None


def first_guess(report: HeldOut) -> float:
    """Share of right first guesses, over all places."""
    counted = [(each.rates[0] or 0.0, each.places) for each in report.acceptance]
    return sum(rate * places for rate, places in counted) / max(1, sum(places for _, places in counted))
