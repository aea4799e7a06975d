"""Coupled verification: sample every entry with the shared noise, accept what the draft foresaw.

Exact by construction: each sampled token depends on the target's logits, the seed and the position
alone. A proposal only decides how many of them one forward yields.
"""

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from protocol.messages.sampling import Likelihood, Sampling
from protocol.sampling.sampler import Noise, scores
from target_worker.verification.proposed_tree import ProposedTree


class Acceptance(NamedTuple):
    """Entries accepted from the root down, and the token the target added behind them."""

    accepted: tuple[int, ...]
    bonus: int
    likelihoods: tuple[Likelihood, ...] = ()
    """Of both, if they were asked for."""


def coupled(
    logits: mx.array, proposal: ProposedTree, history: Sequence[int], sampling: Sampling, noise: Noise
) -> Acceptance:
    """Accept a proposed token iff it is the sampled one. `logits` is (L, V), a row an entry."""
    after = [position + 1 for position in proposal.positions]
    picks = mx.argmax(scores(logits, after, sampling, proposal.contexts(history, sampling), noise), axis=-1)
    return walked(proposal, as_ids(picks))


def walked(proposal: ProposedTree, picks: Sequence[int]) -> Acceptance:
    """From the root, follow the picked token for as long as it was proposed."""
    accepted = []
    entry = 0
    while (child := proposal.children[entry].get(picks[entry])) is not None:
        accepted.append(child)
        entry = child
    return Acceptance(tuple(accepted), picks[entry])


def as_ids(picks: mx.array) -> list[int]:
    """Compute the picks and bring them to Python."""
    return np.array(picks).tolist()
