"""An engine's result for one evaluated node: the tokens that may follow it. Knows no tree and no model."""

from collections.abc import Sequence
from typing import NamedTuple


class Support(NamedTuple):
    """The distribution that a main child was sampled from (rejection mode). Both fields are equally long; sum 1."""

    tokens: Sequence[int]
    probabilities: Sequence[float]


class Candidates(NamedTuple):
    """Tokens that may follow a node, the main one first, the others by falling probability.

    Probabilities are conditional on the node. In coupled mode the main one is the most probable; in
    rejection mode it is the one sampled from `support`.
    """

    tokens: Sequence[int]
    probabilities: Sequence[float]
    support: Support | None = None
