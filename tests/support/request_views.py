"""What strategies see of a request, for tests of their decisions."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from orchestrator.core.estimates import Estimates
from protocol.speculation.token_tree import Node, TokenTree


def seen_request(tree: TokenTree, estimates: Estimates, **others: Any) -> Any:
    """With room for 100 tokens, without guesses by prompt lookup. `others`: of the request, or, by the names of
    `Speculation`, of its draft, which does nothing."""
    draft = {"grown_at": 0.0, "ready_at": 0.0, "reading_until": 0.0, "asked_at": 0.0, "steps": 0}
    draft |= {"drafting": False, "in_turns": False, "resting": False, "lag": lambda since: 0.0}
    draft |= {"tree": tree, "estimates": estimates}
    request = {"ready_since": 0.0, "room": 100, "plain_rounds": 0, "level": "tree", "guesses_behind": lambda leaf: []}
    request |= {"task": SimpleNamespace(draft_tokens=None), "tree": tree, "estimates": estimates}
    draft |= {name: others.pop(name) for name in list(others) if name in draft}
    return SimpleNamespace(speculation=SimpleNamespace(**draft), **{**request, **others})


def guesses_behind(leaf: Node, guesses: Iterable[tuple[int, float]]) -> list[Node]:
    """A chain of guesses by prompt lookup, each a token and its believed probability."""
    nodes: list[Node] = []
    for token, belief in guesses:
        nodes.append((nodes[-1] if nodes else leaf).guess(token, belief, belief))
    return nodes
