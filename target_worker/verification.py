"""Which tokens of a proposed tree are accepted: its entries, coupled verification, log-probabilities.

Knows logits and trees; no KV and no messages. A token is sampled behind every entry with the shared noise, and the
entries that match are accepted. It is exact by construction: a sampled token depends only on the logits, the seed and
the position; the proposal only affects how many tokens one forward yields.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import mlx.core as mx
import numpy as np

from protocol.messages.base import LEAST_LOG_PROBABILITY, Level, NodeId
from protocol.messages.sampling import Sampling, TokenLogprob
from protocol.messages.worker import Verify
from protocol.sampling.gumbel_noise import Noise, sampled, scores
from protocol.sampling.top_tokens import log_total, top
from protocol.speculation.token_tree import fits, node_id


class ProposedTree:
    """A valid Verify, indexed for the acceptance rules.

    Entry 0 is the root. `positions[i]` is the absolute position of entry i. The forward needs no more than these, so
    the rest is derived when it is first read.
    """

    def __init__(self, verify: Verify) -> None:
        self.tokens = verify.tokens
        self.parents = verify.parents
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

    @property
    def paths(self) -> list[tuple[int, ...]]:
        """For each entry, the tokens behind the root up to and with the entry."""
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(self.tokens[1:], self.parents[1:], strict=True):
            paths.append((*paths[parent], token))
        return paths

    def path(self, accepted: Sequence[int]) -> tuple[NodeId, ...]:
        """The node ids of `accepted` entries, which form a path from the root down."""
        ids = [self._root]
        for entry in accepted:
            ids.append(node_id(ids[-1], self.tokens[entry]))
        return tuple(ids[1:])


def flaw(verify: Verify, context: int, level: Level) -> str | None:
    """The reason, as a sentence, why the target can't verify this tree; None if it can.

    The orchestrator's trees are well-formed and hold tokens of the vocabulary. But the target may have fallen to a
    lower level meanwhile.
    """
    if not fits(verify.parents, level):
        if level == "chain":
            return "The tree branches, and this target verifies one path a forward."
        return "The tree has nodes below its root, and this target evaluates one token a forward."
    deepest = max(ProposedTree(verify).positions)
    if deepest >= context:
        return f"The tree reaches position {deepest}; the target's context ends at {context - 1}."
    return None


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
    """(L,) the token sampled from each row at the absolute position behind it, on a GPU not yet computed. `begun`: a
    row of NaN gives `UNKNOWN`, see `LogitsProcessors.begin`."""
    if not begun:
        return sampled(logits, positions, sampling, noise)
    found = scores(logits, positions, sampling, noise)
    return mx.where(mx.isnan(found[:, 0]), UNKNOWN, mx.argmax(found, axis=-1).astype(mx.int32))


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
