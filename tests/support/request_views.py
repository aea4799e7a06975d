"""What strategies see of a request, for tests of their decisions."""

from collections.abc import Iterable
from typing import Any

from orchestrator.core.policy.decision import RequestView
from orchestrator.core.policy.estimates import Estimates
from protocol.speculation.token_tree import Node, TokenTree


def request_view(tree: TokenTree, estimates: Estimates, **others: Any) -> RequestView:
    """Of a request with room for 100 tokens, without a draft and without guesses by prompt lookup."""
    fields = dict.fromkeys(("now", "ready_since", "grown_at", "lag", "draft_ready_at"), 0.0)
    others = {"room": 100, "drafting": False, "lookup": lambda leaf: [], **others}
    return RequestView(tree=tree, estimates=estimates, **{**fields, **others})


def guesses_behind(leaf: Node, guesses: Iterable[tuple[int, float]]) -> list[Node]:
    """A chain of guesses by prompt lookup, each a token and its believed probability."""
    nodes: list[Node] = []
    for token, belief in guesses:
        nodes.append((nodes[-1] if nodes else leaf).guess(token, belief, belief))
    return nodes
