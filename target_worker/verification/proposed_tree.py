"""A proposed token tree in the target: its entries, and the check that the target can verify it.

Pure; knows no model and no KV.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property

from protocol.messages.base import Level, NodeId
from protocol.messages.plans import Distribution
from protocol.messages.sampling import Sampling
from protocol.messages.worker import Verify
from protocol.speculation.token_tree import fits, node_id


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

    def chain(self) -> list[int]:
        """Entries from the root along first children."""
        entries = [0]
        while self.children[entries[-1]]:
            entries.append(next(iter(self.children[entries[-1]].values())))
        return entries

    def path(self, accepted: Sequence[int]) -> tuple[NodeId, ...]:
        """The node ids of `accepted` entries, which form a path from the root down."""
        ids = [self._root]
        for entry in accepted:
            ids.append(node_id(ids[-1], self.tokens[entry]))
        return tuple(ids[1:])


def flaw(verify: Verify, sampling: Sampling, vocabulary: int, context: int, level: Level) -> str | None:
    """The reason, as a sentence, why the target can't verify this tree; None if it can."""
    structural = _structural_flaw(verify) or _level_flaw(verify, level)
    if structural:
        return structural
    if max(verify.tokens) >= vocabulary:
        return f"The tree holds token {max(verify.tokens)}; the target's vocabulary ends at {vocabulary - 1}."
    proposal = ProposedTree(verify)
    if max(proposal.positions) >= context:
        return f"The tree reaches position {max(proposal.positions)}; the target's context ends at {context - 1}."
    if sampling.verification == "coupled":
        return None
    if any(len(children) > 1 for children in proposal.children):
        return "Rejection sampling verifies only chains, and this tree branches: use coupled verification."
    return next(_distribution_flaws(proposal, verify.distributions, vocabulary), None)


def _structural_flaw(verify: Verify) -> str | None:
    if len(verify.parents) != len(verify.tokens):
        return f"The tree has {len(verify.parents)} parents for {len(verify.tokens)} tokens."
    if verify.parents[0] != -1:
        return "The tree's first entry is not a root."
    if any(not 0 <= parent < entry for entry, (_, parent) in enumerate(_below_root(verify), start=1)):
        return "The tree has an entry whose parent is not before it."
    if len(set(_below_root(verify))) != len(verify.tokens) - 1:
        return "The tree proposes a token twice behind the same entry."
    return None


def _level_flaw(verify: Verify, level: Level) -> str | None:
    if fits(verify.parents, level):
        return None
    if level == "chain":
        return "The tree branches, and this target verifies one path a forward."
    return "The tree has nodes below its root, and this target evaluates one token a forward."


def _distribution_flaws(
    proposal: ProposedTree, distributions: Sequence[Distribution], vocabulary: int
) -> Iterator[str]:
    if len(proposal.distributions) != len(distributions):
        yield "The tree has two distributions for one node."
    for distribution in distributions:
        if len(distribution.tokens) != len(distribution.probabilities):
            yield "A draft distribution has unequal numbers of tokens and probabilities."
        elif len(set(distribution.tokens)) != len(distribution.tokens):
            yield "A draft distribution has a token twice."
        elif max(distribution.tokens) >= vocabulary:
            yield f"A draft distribution has token {max(distribution.tokens)}, beyond the target's vocabulary."
    for entry, children in enumerate(proposal.children):
        distribution = proposal.distribution(entry)
        for token in children:
            if distribution is not None and not _possible(token, distribution):
                yield f"Token {token} can't have been drawn from the distribution sent with it."


def _possible(token: int, distribution: Distribution) -> bool:
    return dict(zip(distribution.tokens, distribution.probabilities, strict=False)).get(token, 0.0) > 0.0


def _below_root(verify: Verify) -> list[tuple[int, int]]:
    return list(zip(verify.tokens[1:], verify.parents[1:], strict=True))
