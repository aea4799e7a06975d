"""One request as a watcher sees it: its token tree, its last tokens, its figures. Pure."""

from collections.abc import Callable, Mapping
from typing import Literal

from orchestrator.core.phases import Phase
from orchestrator.core.request_stats import RequestStats
from orchestrator.core.sequence import Sequence
from protocol.messages.base import NodeId, SequenceId
from protocol.messages.telemetry import (
    MOST_DEPTHS,
    MOST_NODES,
    MOST_REQUESTS,
    RequestSnapshot,
    RequestSummary,
    TreeSnapshot,
)
from protocol.messages.worker import Verify
from protocol.speculation.token_tree import Node, TokenTree, node_id

_TAIL = 24
"""Committed tokens."""
_KEYS = (1 << 53) - 1
_PHASES: Mapping[Phase, Literal["waiting", "prefilling", "ready", "verifying"]] = {
    Phase.WAITING: "waiting",
    Phase.ADMITTED: "prefilling",
    Phase.DELEGATED: "prefilling",
    Phase.PREFILLING: "prefilling",
    Phase.READY: "ready",
    Phase.VERIFYING: "verifying",
}


def snapshot(sequence: Sequence, text: Callable[[int], str]) -> RequestSnapshot:
    """`text` of a single token."""
    stats, estimates = sequence.stats, sequence.estimates
    drawing = _Drawing(sequence.tree, text)
    asked = drawing.asked(sequence.outstanding) if sequence.outstanding is not None else ()
    drawing.fill()
    tail = sequence.tokens[-_TAIL:]
    decoding = 0.0
    if stats.decode_began_at is not None and stats.last_token_at is not None:
        decoding = max(0.0, stats.last_token_at - stats.decode_began_at)
    return RequestSnapshot(
        sequence=sequence.id,
        round=sequence.round,
        tail=tuple(text(token) for token in tail),
        prompt=max(0, len(tail) - (len(sequence.tokens) - len(sequence.request.tokens))),
        tree=drawing.branches(),
        asked=asked,
        nodes=len(sequence.tree),
        prompt_tokens=stats.prompt_tokens,
        adopted=stats.adopted,
        prefill=stats.prefill_seconds,
        generated=stats.generated,
        decoding=decoding,
        rounds=stats.rounds,
        hits=stats.hits,
        chances=stats.hit_chances,
        accepted=_depths(stats, "accepted"),
        tried=_depths(stats, "tried"),
        evaluated=stats.evaluated,
        target_seconds=stats.target_seconds,
        draft_seconds=stats.draft_seconds,
        plain=estimates.target(1) if estimates.target.known else None,
        step=estimates.step.value,
        hop=estimates.hop.value,
    )


def verification_snapshot(verify: Verify, tree: TokenTree, text: Callable[[int], str]) -> TreeSnapshot:
    """What is under verification, with what is believed of it in `tree`."""
    drawing = _Drawing(tree, text)
    drawing.asked(verify)
    return drawing.branches()


def request_list(
    sequences: Mapping[SequenceId, Sequence], shown: Sequence | None, now: float
) -> tuple[RequestSummary, ...]:
    """The oldest ones, and the one that is shown."""
    listed = list(sequences.values())[:MOST_REQUESTS]
    if shown is not None and shown not in listed:
        listed[-1] = shown
    return tuple(
        RequestSummary(
            sequence=one.id,
            phase=_PHASES[one.phase],
            generated=one.stats.generated,
            since=max(0.0, now - one.stats.arrived),
        )
        for one in listed
    )


class _Drawing:
    """Nodes of one tree in the order in which they are to be told, parents first."""

    def __init__(self, tree: TokenTree, text: Callable[[int], str]) -> None:
        self._tree = tree
        self._text = text
        self._index: dict[NodeId, int] = {}
        self._texts: list[str] = []
        self._parents: list[int] = []
        self._chances: list[float | None] = []
        self._paths: list[float] = []
        self._put(tree.root.id, tree.root.token, -1, 1.0, 1.0)

    def asked(self, verify: Verify) -> tuple[int, ...]:
        """Put what is under verification below this root, and return its entries; nothing if the root is another."""
        if verify.root != self._tree.root.id:
            return ()
        ids = [verify.root]
        for token, parent in zip(verify.tokens[1:MOST_NODES], verify.parents[1:MOST_NODES], strict=True):
            ids.append(node_id(ids[parent], token))
            node = self._tree.get(ids[-1])
            if node is not None:
                self._put_node(node)
            else:
                # Looked up in the text: the tree holds only what the draft grew.
                at = self._index[ids[parent]]
                self._put(ids[-1], token, at, None, self._paths[at])
        return tuple(self._index[id] for id in ids)

    def fill(self) -> None:
        """Put the most probable nodes, as many as there is room for."""
        for node in self._tree.best():
            if len(self._texts) == MOST_NODES:
                return
            if node.id not in self._index:
                self._put_node(node)

    def branches(self) -> TreeSnapshot:
        return TreeSnapshot(
            keys=tuple(id & _KEYS for id in self._index),
            texts=tuple(self._texts),
            parents=tuple(self._parents),
            chances=tuple(self._chances),
            paths=tuple(self._paths),
        )

    def _put_node(self, node: Node) -> None:
        assert node.parent is not None
        path = self._tree.path_probability(node)
        self._put(node.id, node.token, self._index[node.parent.id], min(1.0, node.probability), path)

    def _put(self, id: NodeId, token: int, parent: int, chance: float | None, path: float) -> None:
        self._index[id] = len(self._texts)
        self._texts.append(self._text(token))
        self._parents.append(parent)
        self._chances.append(None if chance is None else round(chance, 4))
        self._paths.append(round(path, 5))


def _depths(stats: RequestStats, which: Literal["accepted", "tried"]) -> tuple[int, ...]:
    counts = stats.accepted if which == "accepted" else stats.tried
    return tuple(counts[depth] for depth in range(1, min(len(stats.tried), MOST_DEPTHS) + 1))
