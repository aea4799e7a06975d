"""Rejection sampling of chains whose tokens were drawn from a draft distribution.

Leviathan, Kalman and Matias, "Fast inference from transformers via speculative decoding" (ICML 2023),
appendix A.1: accept x with probability min(1, p(x)/q(x)), else draw from norm(max(p - q, 0)). The tokens are
distributed as p for every q. Random numbers are counter-based: the seed determines the output.
"""

from collections.abc import Iterable, Sequence

import mlx.core as mx
import numpy as np

from protocol.messages.plans import Distribution
from protocol.messages.sampling import Sampling
from protocol.sampling.sampler import Noise
from protocol.sampling.threefry import NoiseStream, noise_bits, uniform
from target_worker.verification.acceptance import Acceptance, as_ids
from target_worker.verification.coupled import coupled
from target_worker.verification.proposed_tree import ProposedTree


def rejection(logits: mx.array, proposal: ProposedTree, sampling: Sampling, noise: Noise) -> Acceptance:
    """Accept a prefix of the proposed chain and add one token. `logits`: (L, V) processed logits, one row per entry.

    At temperature 0, p is one-hot, and both rules accept exactly the target's own tokens.
    """
    if sampling.greedy:
        return coupled(logits, proposal, sampling, noise)
    chain = proposal.chain()
    target = mx.softmax(logits.astype(mx.float32) / sampling.temperature, axis=-1)
    draft = draft_probabilities(proposal, logits.shape[-1])
    replacements = mx.argmax(_residual_scores(target, draft, proposal, sampling, noise), axis=-1)
    ratios = _ratios(target, draft, proposal, chain)
    mx.eval(replacements, ratios)
    kept = _accepted(np.array(ratios), [proposal.positions[entry] for entry in chain[1:]], sampling.seed)
    return Acceptance(tuple(chain[1 : kept + 1]), as_ids(replacements)[chain[kept]])


def draft_probabilities(proposal: ProposedTree, vocabulary: int) -> mx.array:
    """(L, V) float32: q behind each entry. One-hot for a deterministic proposal, 0 behind the chain's end."""
    entries, tokens, masses = [], [], []
    for entry, children in enumerate(proposal.children):
        for token, mass in _draft_masses(proposal.distribution(entry), children):
            entries.append(entry)
            tokens.append(token)
            masses.append(mass)
    dense = mx.zeros((len(proposal.tokens), vocabulary))
    if masses:
        dense[mx.array(entries), mx.array(tokens)] = mx.array(masses)
    return dense


def _draft_masses(distribution: Distribution | None, children: Iterable[int]) -> Iterable[tuple[int, float]]:
    if distribution is None:
        return ((token, 1.0) for token in children)
    if not children:
        return ()
    total = sum(distribution.probabilities)
    return zip(distribution.tokens, (mass / total for mass in distribution.probabilities), strict=True)


def _ratios(target: mx.array, draft: mx.array, proposal: ProposedTree, chain: list[int]) -> mx.array:
    """(K,) p(x)/q(x) of each proposed token of the chain."""
    entries = mx.array(chain[:-1], dtype=mx.int32)
    tokens = mx.array([proposal.tokens[entry] for entry in chain[1:]], dtype=mx.int32)
    return target[entries, tokens] / draft[entries, tokens]


def _residual_scores(
    target: mx.array, draft: mx.array, proposal: ProposedTree, sampling: Sampling, noise: Noise
) -> mx.array:
    """(L, V): the argmax of row i is a sample of norm(max(p - q, 0)), or of p where no token was proposed."""
    residual = mx.maximum(target - draft, 0.0)
    # If p and q agree to the last bit, only rounding can cause a rejection.
    residual = mx.where(residual.sum(axis=-1, keepdims=True) > 0, residual, target)
    rows = [noise.row(sampling.seed, position + 1, NoiseStream.RESIDUAL) for position in proposal.positions]
    return mx.log(residual) + mx.stack(rows)


def _accepted(ratios: np.ndarray, positions: Sequence[int], seed: int) -> int:
    """The number of tokens before the first rejection. `ratios`: p/q of each proposed token."""
    for index, (ratio, position) in enumerate(zip(ratios.tolist(), positions, strict=True)):
        if acceptance_uniform(seed, position) >= ratio:
            return index
    return len(positions)


def acceptance_uniform(seed: int, position: int) -> float:
    """The uniform number that decides whether the token at absolute `position` is accepted."""
    return float(uniform(noise_bits(seed, position, np.zeros(1, dtype=np.int64), 1, NoiseStream.ACCEPT))[0])
