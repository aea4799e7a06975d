"""Coupled verification: sample a token behind every entry with the shared noise, accept the entries that match.

Exact by construction: each sampled token depends only on the target's logits, the seed and the position. The proposal
only affects how many tokens one forward yields.
"""

from collections.abc import Mapping, Sequence

import mlx.core as mx

from protocol.messages.sampling import Sampling
from protocol.sampling.sampler import Noise, scores
from target_worker.verification.acceptance import Acceptance, as_ids
from target_worker.verification.proposed_tree import ProposedTree


def coupled(logits: mx.array, proposal: ProposedTree, sampling: Sampling, noise: Noise) -> Acceptance:
    """Accept a proposed token iff it is the sampled one. `logits`: (L, V) processed logits, one row per entry."""
    after = [position + 1 for position in proposal.positions]
    picks = mx.argmax(scores(logits, after, sampling, noise), axis=-1)
    mx.async_eval(picks)
    # The host indexes the tree while the device computes the logits.
    children = proposal.children
    return follow(children, as_ids(picks))


def follow(children: Sequence[Mapping[int, int]], picks: Sequence[int]) -> Acceptance:
    """Accept the entries on the path of picked tokens from the root. `children`: see `ProposedTree`."""
    accepted = []
    entry = 0
    while (child := children[entry].get(picks[entry])) is not None:
        accepted.append(child)
        entry = child
    return Acceptance(tuple(accepted), picks[entry])
