"""Which tokens of a proposed tree are accepted: its entries, coupled verification, rejection, log-probabilities.

Knows logits and trees; no KV and no messages. Coupled verification samples a token behind every entry with the shared
noise and accepts the entries that match. It is exact by construction: a sampled token depends only on the logits, the
seed and the position; the proposal only affects how many tokens one forward yields. Rejection sampling verifies chains
whose tokens were drawn from a draft distribution, all tokens of a chain together: `Block`. The tokens are distributed
as the target's for every draft distribution. The seed determines the output.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from protocol.messages.base import LEAST_LOG_PROBABILITY, MAX_NODES, Level, NodeId
from protocol.messages.plans import Distribution
from protocol.messages.sampling import Sampling, TokenLogprob
from protocol.messages.worker import Verify
from protocol.sampling.gumbel_noise import Noise, scores
from protocol.sampling.threefry import NoiseStream, noise_bits, uniform
from protocol.sampling.top_tokens import log_total, top
from protocol.speculation.token_tree import fits, node_id

_TINY = 1e-30
"""In place of a sum of probabilities that is 0, as a divisor."""


class ProposedTree:
    """A valid Verify, indexed for the acceptance rules.

    Entry 0 is the root. `positions[i]` is the absolute position of entry i. The forward needs no more than these, so
    the rest is derived when it is first read.
    """

    def __init__(self, verify: Verify) -> None:
        self.tokens = verify.tokens
        self.parents = verify.parents
        self.distributions = {distribution.node: distribution for distribution in verify.distributions}
        self._root = verify.root
        self.positions = [verify.position]
        for parent in verify.parents[1:]:
            self.positions.append(self.positions[parent] + 1)

    @cached_property
    def children(self) -> list[dict[int, int]]:
        """For each entry, the entries of the tokens proposed behind it, by token."""
        children: list[dict[int, int]] = [{} for _ in self.tokens]
        for entry, parent in enumerate(self.parents[1:], start=1):
            children[parent][self.tokens[entry]] = entry
        return children

    @cached_property
    def ids(self) -> list[NodeId]:
        """The node id of each entry."""
        ids = [self._root]
        for token, parent in zip(self.tokens[1:], self.parents[1:], strict=True):
            ids.append(node_id(ids[parent], token))
        return ids

    @property
    def paths(self) -> list[tuple[int, ...]]:
        """For each entry, the tokens behind the root up to and with the entry."""
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(self.tokens[1:], self.parents[1:], strict=True):
            paths.append((*paths[parent], token))
        return paths

    def distribution(self, entry: int) -> Distribution | None:
        """The draft distribution of the children of `entry`; None for a deterministic proposal."""
        return self.distributions.get(self.ids[entry])

    def path(self, accepted: Sequence[int]) -> tuple[NodeId, ...]:
        """The node ids of `accepted` entries, which form a path from the root down."""
        ids = [self._root]
        for entry in accepted:
            ids.append(node_id(ids[-1], self.tokens[entry]))
        return tuple(ids[1:])


def flaw(verify: Verify, sampling: Sampling, vocabulary: int, context: int, level: Level) -> str | None:
    """The reason, as a sentence, why the target can't verify this tree; None if it can.

    The orchestrator's trees are well-formed and hold tokens of the vocabulary. But the target may have fallen to a
    lower level meanwhile, and distributions are as a draft stated them.
    """
    if not fits(verify.parents, level):
        if level == "chain":
            return "The tree branches, and this target verifies one path a forward."
        return "The tree has nodes below its root, and this target evaluates one token a forward."
    proposal = ProposedTree(verify)
    if max(proposal.positions) >= context:
        return f"The tree reaches position {max(proposal.positions)}; the target's context ends at {context - 1}."
    if sampling.verification == "coupled":
        return None
    if any(len(children) > 1 for children in proposal.children):
        return "Rejection sampling verifies only chains, and this tree branches: use coupled verification."
    return next(_distribution_flaws(proposal, vocabulary), None)


def _distribution_flaws(proposal: ProposedTree, vocabulary: int) -> Iterator[str]:
    for distribution in proposal.distributions.values():
        if len(distribution.tokens) != len(distribution.probabilities):
            yield "A draft distribution has unequal numbers of tokens and probabilities."
        elif len(set(distribution.tokens)) != len(distribution.tokens):
            yield "A draft distribution has a token twice."
        elif max(distribution.tokens) >= vocabulary:
            yield f"A draft distribution has token {max(distribution.tokens)}, beyond the target's vocabulary."
    for entry, children in enumerate(proposal.children):
        found = proposal.distribution(entry)
        possible = None if found is None else dict(zip(found.tokens, found.probabilities, strict=True))
        for token in children:
            if possible is not None and not possible.get(token):
                yield f"Token {token} can't have been drawn from the distribution sent with it."


class Acceptance(NamedTuple):
    """The accepted entries from the root down, and the bonus token behind them."""

    accepted: tuple[int, ...]
    bonus: int
    token_logprobs: tuple[TokenLogprob, ...] = ()
    """TokenLogprobs of the accepted tokens and the bonus token, if the request wants log-probabilities."""
    waited: bool = False
    """The bonus token was `UNKNOWN` to a forward that has begun behind it."""


def as_ids(picks: mx.array) -> list[int]:
    """Evaluate `picks` and convert them to Python numbers."""
    found: Any = picks.tolist()
    return found


class RowLogprobs(NamedTuple):
    """Log-probabilities that the device computes, a row for each token."""

    logs: mx.array
    """(L, 1), of the tokens."""
    alternatives: tuple[mx.array, mx.array] | None
    """The most probable tokens and their log-probabilities, (L, n) each, best first; None if none are wanted."""

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return (self.logs, *(self.alternatives or ()))

    def read(self, rows: Sequence[int]) -> tuple[TokenLogprob, ...]:
        logs = _numbers(self.logs)
        if self.alternatives is None:
            return tuple(TokenLogprob(_bounded(logs[row][0])) for row in rows)
        ids, best = map(_numbers, self.alternatives)
        return tuple(
            TokenLogprob(_bounded(logs[row][0]), tuple(zip(ids[row], map(_bounded, best[row]), strict=True)))
            for row in rows
        )


def begin_logprobs(logits: mx.array, tokens: mx.array, count: int) -> RowLogprobs:
    """The logprob of each of (L,) `tokens` and the `count` most probable tokens, by the model's (L, V) unprocessed
    `logits`, not yet computed."""
    chosen = logits.astype(mx.float32)
    totals = log_total(chosen)
    logs = mx.take_along_axis(chosen, tokens[:, None], axis=-1) - totals
    if not count:
        return RowLogprobs(logs, None)
    ids, best = top(chosen, min(count, chosen.shape[-1]))
    return RowLogprobs(logs, (ids, best - totals))


def token_logprobs(
    logits: mx.array, rows: Sequence[int], tokens: Sequence[int], count: int
) -> tuple[TokenLogprob, ...]:
    """The same of each `tokens[i]` by row `rows[i]` of `logits`, computed."""
    told = begin_logprobs(logits[mx.array(list(rows))], mx.array(list(tokens)), count)
    mx.eval(told.arrays)
    return told.read(range(len(rows)))


def _numbers(rows: mx.array) -> list[list[Any]]:
    """Evaluate (L, n) `rows` and convert them to Python numbers."""
    return np.array(rows).tolist()


def _bounded(value: float) -> float:
    # Rounding can raise the logarithm of a probability of 1 above 0.
    return min(0.0, max(LEAST_LOG_PROBABILITY, value))


Walk: TypeAlias = Callable[[], Acceptance]
"""Reads what the device samples meanwhile, and accepts."""
UNKNOWN = -1
"""In place of a token that is sampled once the host has waited for the device."""


def pick(logits: mx.array, positions: Sequence[int], sampling: Sampling, noise: Noise, *, begun: bool) -> mx.array:
    """(L,) the token sampled from each row at the absolute position behind it, not yet computed. `begun`: a row of NaN
    gives `UNKNOWN`, see `LogitsProcessors.begin`."""
    found = scores(logits, positions, sampling, noise)
    picks = mx.argmax(found, axis=-1)
    return mx.where(mx.isnan(found[:, 0]), UNKNOWN, picks.astype(mx.int32)) if begun else picks


def coupled(
    logits: mx.array,
    proposal: ProposedTree,
    sampling: Sampling,
    noise: Noise,
    *,
    begun: bool = False,
    tell: Callable[[mx.array], RowLogprobs] | None = None,
) -> Walk:
    """Begin to sample. A proposed token is accepted iff it is the sampled one. `logits`: (L, V) processed logits, one
    row per entry. `begun`: see `pick`; the bonus token may be `UNKNOWN`. `tell`: begins the logprobs of the sampled
    tokens, which are accepted with them."""
    after = [position + 1 for position in proposal.positions]
    picks = pick(logits, after, sampling, noise, begun=begun)
    told = None if tell is None else tell(picks)
    mx.async_eval(picks, *(() if told is None else told.arrays))
    # The host indexes the tree while the device computes the logits.
    children = proposal.children

    def walk() -> Acceptance:
        found = follow(children, as_ids(picks))
        return found if told is None else found._replace(token_logprobs=told.read((0, *found.accepted)))

    return walk


def follow(children: Sequence[Mapping[int, int]], picks: Sequence[int]) -> Acceptance:
    """Accept the entries on the path of picked tokens from the root. `children`: see `ProposedTree`."""
    accepted = []
    entry = 0
    while (child := children[entry].get(picks[entry])) is not None:
        accepted.append(child)
        entry = child
    return Acceptance(tuple(accepted), picks[entry])


class Block(NamedTuple):
    """Block verification of a chain X_1 .. X_K: Sun et al., "Block Verification Accelerates Speculative Decoding"
    (arXiv 2403.10444), algorithm 2. With P_i and Q_i, the target's and the draft's distributions behind X_i (X_0: the
    root),

        w_0 = 1,  w_i = min(1, w_(i-1) P_(i-1)(X_i) / Q_(i-1)(X_i)),
        S_i = sum over x of max(0, w_i P_i(x) - Q_i(x)),
        h_i = S_i / (S_i + 1 - w_i) for 0 < i < K,  h_K = w_K.

    Every i has a uniform number of its own. The largest i whose number is below h_i is the number of accepted tokens, 0
    if there is none. The token behind them is drawn in proportion to max(0, w_i P_i - Q_i), behind X_K from P_K. What
    is emitted, and then continued by the target, is distributed as the target's tokens. No rule that verifies a block
    with this draft accepts more in expectation: token by token (Leviathan et al. 2023), a token that is improbable
    ends the chain even where those before it were more probable under the target than under the draft.
    """

    chances: mx.array
    """(K,) h_1 .. h_K."""
    residual: mx.array
    """(K + 1, V): the weights from which the token behind X_i is drawn."""


def block(target: mx.array, draft: mx.array, tokens: Sequence[int]) -> Block:
    """`target` and `draft`: (K + 1, V) float32, P_i and Q_i from the root on; Q_K is not read. `tokens`: X_1 .. X_K,
    each with a Q above 0."""
    weights = [mx.ones(())]
    for place, token in enumerate(tokens):
        weights.append(mx.minimum(weights[-1] * (target[place, token] / draft[place, token]), 1.0))
    carried = mx.stack(weights)
    residual = mx.maximum(carried[:-1, None] * target[:-1] - draft[:-1], 0.0)
    sums = residual.sum(axis=-1)
    # If P and Q agree to the last bit and w is 1, h does not matter: a later token of the chain is accepted.
    between = sums[1:] / mx.maximum(sums[1:] + (1.0 - carried[1:-1]), _TINY)
    # Only rounding can accept nothing of a chain that the target draws as the draft does.
    residual = mx.where(sums[:, None] > 0, residual, target[:-1])
    return Block(mx.concatenate([between, carried[-1:]])[: len(tokens)], mx.concatenate([residual, target[-1:]]))


def rejection(logits: mx.array, proposal: ProposedTree, sampling: Sampling, noise: Noise) -> Walk:
    """Begin to sample. A prefix of the proposed chain is accepted, and one token added. `logits`: (L, V) processed
    logits, one row per entry.

    At temperature 0, P is one-hot, and both rules accept exactly the target's own tokens.
    """
    if sampling.greedy:
        return coupled(logits, proposal, sampling, noise)
    # A chain's entries are in its order, since parents come first.
    target = mx.softmax(logits.astype(mx.float32) / sampling.temperature, axis=-1)
    draft = draft_probabilities(proposal, logits.shape[-1])
    verified = block(target, draft, proposal.tokens[1:])
    rows = [noise.row(sampling.seed, position + 1, NoiseStream.RESIDUAL) for position in proposal.positions]
    replacements = mx.argmax(mx.log(verified.residual) + mx.stack(rows), axis=-1)
    mx.async_eval(replacements, verified.chances)

    def walk() -> Acceptance:
        chances = np.array(verified.chances)
        below = acceptance_uniforms(sampling.seed, proposal.positions[0], len(chances)) < chances
        kept = int(np.flatnonzero(below)[-1]) + 1 if below.any() else 0
        return Acceptance(tuple(range(1, kept + 1)), as_ids(replacements)[kept])

    return walk


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


def acceptance_uniforms(seed: int, root: int, count: int) -> npt.NDArray[np.float32]:
    """The uniform numbers that decide how many of a chain's `count` tokens are accepted behind the root at absolute
    position `root`. All of them are read, so they belong to the root: no other round has it."""
    return uniform(noise_bits(seed, root, np.arange(count), MAX_NODES, NoiseStream.ACCEPT))
