"""The tokens of a modelled target and the guesses of a modelled draft: the interface, and stateless noise. Pure."""

from collections.abc import Sequence
from typing import Protocol

from protocol.messages.base import NodeId
from protocol.speculation.token_tree import Candidates, node_id

VOCABULARY = 1 << 20
"""The largest vocabulary of a worker: random tokens hardly ever repeat, so that prompt lookup finds nothing."""


class Language(Protocol):
    """Deterministic: equal arguments give equal results.

    A request is identified by its number, which is the seed of its sampling.
    """

    def prompt(self, request: int) -> tuple[int, ...]: ...

    def token(self, request: int, position: int) -> int:
        """The target's token at this absolute position."""
        ...

    def candidates(self, request: int, node: NodeId, position: int, on_target_path: bool, limit: int) -> Candidates:
        """At most `limit` guesses of the token at `position`, below this node, by falling claimed probability.

        `on_target_path`: the path to the node consists of the target's tokens, so that a guess can be right.
        """
        ...


def uniform(*key: int) -> float:
    """A number strictly inside (0, 1), a function of `key` alone."""
    return ((_mixed(key) >> 10) + 0.5) / (1 << 53)


def random_token(*key: int) -> int:
    """A token of the invented vocabulary, a function of `key` alone."""
    return _mixed(key) % VOCABULARY


def _mixed(key: Sequence[int]) -> int:
    mixed = NodeId(len(key))
    for part in key:
        mixed = node_id(mixed, part)
    # A second round: after one round the high bits of neighbouring keys are alike.
    return node_id(mixed, 1)
