"""Snapshots of a request for telemetry: its token tree, its last tokens, its figures. Pure."""

from collections.abc import Callable, Mapping
from typing import Literal

from orchestrator.core.phases import Phase
from orchestrator.core.request_stats import RequestStats
from orchestrator.core.sequence import Sequence
from protocol.messages.base import NodeId, SequenceId
from protocol.messages.telemetry import (
    MAX_DEPTHS,
    MAX_NODES,
    MAX_REQUESTS,
    RequestSnapshot,
    RequestSummary,
    TreeSnapshot,
)
from protocol.messages.worker import Verify
from protocol.speculation.token_tree import Node, TokenTree, node_id

_LAST_TOKENS = 24
_KEY_MASK = (1 << 53) - 1
"""JavaScript's numbers hold 53 bits."""
_PHASES: Mapping[Phase, Literal["waiting", "prefilling", "ready", "verifying"]] = {
    Phase.WAITING: "waiting",
    Phase.ADMITTED: "prefilling",
    Phase.DELEGATED: "prefilling",
    Phase.PREFILLING: "prefilling",
    Phase.READY: "ready",
    Phase.VERIFYING: "verifying",
}


def snapshot(sequence: Sequence, text: Callable[[int], str]) -> RequestSnapshot:
    """`text` gives the text of a single token."""
    stats, estimates = sequence.stats, sequence.estimates
    builder = _TreeBuilder(sequence.tree, text)
    verifying = builder.add_verified(sequence.outstanding) if sequence.outstanding is not None else ()
    builder.fill()
    last_tokens = sequence.tokens[-_LAST_TOKENS:]
    decode_seconds = 0.0
    if stats.decode_began_at is not None and stats.last_token_at is not None:
        decode_seconds = max(0.0, stats.last_token_at - stats.decode_began_at)
    return RequestSnapshot(
        sequence=sequence.id,
        round=sequence.round,
        last_tokens=tuple(text(token) for token in last_tokens),
        prompt_part=max(0, len(last_tokens) - (len(sequence.tokens) - len(sequence.request.tokens))),
        tree=builder.snapshot(),
        verifying=verifying,
        nodes=len(sequence.tree),
        prompt_tokens=stats.prompt_tokens,
        adopted_tokens=stats.adopted,
        prefill_seconds=stats.prefill_seconds,
        generated_tokens=stats.generated,
        decode_seconds=decode_seconds,
        rounds=stats.rounds,
        hits=stats.hits,
        hit_chances=stats.hit_chances,
        accepted=_depths(stats, "accepted"),
        tried=_depths(stats, "tried"),
        evaluated_nodes=stats.evaluated,
        target_seconds=stats.target_seconds,
        draft_seconds=stats.draft_seconds,
        plain_tokens_per_second=sequence.plain_tokens_per_second(),
        growth_step_seconds=estimates.step.value,
        round_overhead_seconds=estimates.hop.value,
    )


def verification_snapshot(verify: Verify, tree: TokenTree, text: Callable[[int], str]) -> TreeSnapshot:
    """The nodes under verification, with their probabilities in `tree`."""
    builder = _TreeBuilder(tree, text)
    builder.add_verified(verify)
    return builder.snapshot()


def request_list(
    sequences: Mapping[SequenceId, Sequence], selected: Sequence | None, now: float
) -> tuple[RequestSummary, ...]:
    """The oldest requests, and the selected one."""
    listed = list(sequences.values())[:MAX_REQUESTS]
    if selected is not None and selected not in listed:
        listed[-1] = selected
    return tuple(
        RequestSummary(
            sequence=one.id,
            phase=_PHASES[one.phase],
            generated_tokens=one.stats.generated,
            age=max(0.0, now - one.stats.arrived),
        )
        for one in listed
    )


class _TreeBuilder:
    """Collects nodes of one tree, parents first."""

    def __init__(self, tree: TokenTree, text: Callable[[int], str]) -> None:
        self._tree = tree
        self._text = text
        self._index: dict[NodeId, int] = {}
        self._texts: list[str] = []
        self._parents: list[int] = []
        self._probabilities: list[float | None] = []
        self._path_probabilities: list[float] = []
        self._put(tree.root.id, tree.root.token, -1, 1.0, 1.0)

    def add_verified(self, verify: Verify) -> tuple[int, ...]:
        """Add the nodes under verification and return their entries; nothing if `verify` has another root."""
        if verify.root != self._tree.root.id:
            return ()
        ids = [verify.root]
        for token, parent in zip(verify.tokens[1:MAX_NODES], verify.parents[1:MAX_NODES], strict=True):
            ids.append(node_id(ids[parent], token))
            node = self._tree.get(ids[-1])
            if node is not None:
                self._put_node(node)
            else:
                # A token from prompt lookup: the tree holds only what the draft grew.
                above = self._index[ids[parent]]
                self._put(ids[-1], token, above, None, self._path_probabilities[above])
        return tuple(self._index[id] for id in ids)

    def fill(self) -> None:
        """Add the most probable nodes, up to MAX_NODES."""
        for node in self._tree.best():
            if len(self._texts) == MAX_NODES:
                return
            if node.id not in self._index:
                self._put_node(node)

    def snapshot(self) -> TreeSnapshot:
        return TreeSnapshot(
            keys=tuple(id & _KEY_MASK for id in self._index),
            texts=tuple(self._texts),
            parents=tuple(self._parents),
            probabilities=tuple(self._probabilities),
            path_probabilities=tuple(self._path_probabilities),
        )

    def _put_node(self, node: Node) -> None:
        assert node.parent is not None
        path_probability = self._tree.path_probability(node)
        self._put(node.id, node.token, self._index[node.parent.id], min(1.0, node.probability), path_probability)

    def _put(self, id: NodeId, token: int, parent: int, probability: float | None, path_probability: float) -> None:
        self._index[id] = len(self._texts)
        self._texts.append(self._text(token))
        self._parents.append(parent)
        self._probabilities.append(None if probability is None else round(probability, 4))
        self._path_probabilities.append(round(path_probability, 5))


def _depths(stats: RequestStats, which: Literal["accepted", "tried"]) -> tuple[int, ...]:
    counts = stats.accepted if which == "accepted" else stats.tried
    return tuple(counts[depth] for depth in range(1, min(len(stats.tried), MAX_DEPTHS) + 1))
