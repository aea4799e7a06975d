"""What a modelled target says and a modelled draft guesses: the interface, and noise without a state. Pure."""

from collections.abc import Sequence
from typing import Protocol

from protocol.messages.base import NodeId
from protocol.speculation.candidates import Candidates
from protocol.speculation.token_tree import node_id

VOCABULARY = 1 << 20
"""Of made-up tokens, the most that a worker may claim: hardly any two are alike by chance, so that prompt lookup finds
nothing."""


class Language(Protocol):
    """Deterministic: the same question always has the same answer.

    A request is named by its number, which travels as the seed of its sampling.
    """

    def prompt(self, request: int) -> tuple[int, ...]: ...

    def token(self, request: int, position: int) -> int:
        """What the target alone says at this absolute position."""
        ...

    def candidates(self, request: int, node: NodeId, position: int, on_truth: bool, limit: int) -> Candidates:
        """At most `limit` guesses of the token at `position`, behind this node, by falling claimed probability.

        `on_truth`: the path up to the node is what the target says, so that a guess can come true.
        """
        ...


def uniform(*key: int) -> float:
    """A number strictly inside (0, 1) that depends on all of `key` and on nothing else."""
    return ((_mixed(key) >> 10) + 0.5) / (1 << 53)


def made_up(*key: int) -> int:
    """A token of the invented vocabulary."""
    return _mixed(key) % VOCABULARY


def _mixed(key: Sequence[int]) -> int:
    mixed = NodeId(len(key))
    for part in key:
        mixed = node_id(mixed, part)
    # Once more: one round of the hash leaves the high bits of neighbouring keys alike.
    return node_id(mixed, 1)
