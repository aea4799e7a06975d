"""What strategies see of a request, for tests of their decisions."""

from typing import Any

from orchestrator.core.policy.decision import SequenceView
from orchestrator.core.policy.estimates import Estimates
from protocol.speculation.token_tree import TokenTree


def sequence_view(tree: TokenTree, estimates: Estimates, **others: Any) -> SequenceView:
    """Of a request with room for 100 tokens, without a draft and without guesses by prompt lookup."""
    fields = dict.fromkeys(("now", "ready_since", "grown_at", "lag", "draft_ready_at"), 0.0)
    others = {"room": 100, "drafting": False, "lookup": lambda node, limit: [], **others}
    return SequenceView(tree=tree, estimates=estimates, **{**fields, **others})
