"""The rounds of a request from its messages: the verified nodes, the verdict, and the growth steps behind them. Pure.

A growth step is identified by its worker's incarnation and the serial number of its Grow message.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from orchestrator.runtime.recording import Seen
from protocol.messages.base import NodeId
from protocol.messages.worker import Grow, Reroot, Verdict, Verify
from protocol.speculation.token_tree import node_id


class Step(NamedTuple):
    """One growth step."""

    incarnation: int
    serial: int


@dataclass(slots=True)
class VerificationRound:
    """One verification and its verdict."""

    round: int
    asked: int
    """When the orchestrator began to send the Verify; nanoseconds, like all times here."""
    answered: int
    """When it had read the verdict."""
    nodes: int
    """Draft tokens under verification."""
    accepted: int
    tried: int
    """Number of tokens that could have been accepted."""
    hit: bool | None = None
    """The next root had children in the cache; None after the last round, or without a draft."""
    sources: set[Step] = field(default_factory=set)
    """Steps that published a node under verification."""
    accepted_from: set[Step] = field(default_factory=set)
    """Those of them whose tokens the target accepted."""
    used: set[Step] = field(default_factory=set)
    """Those, and the steps without which they would have come too late: each published a token that a later
    one of them was computed behind, before the target had chosen it."""


def rounds(seen: Iterable[Seen]) -> list[VerificationRound]:
    """The rounds with a verdict, in order. `seen`: the messages of one request, in order."""
    growth = _Growth()
    asked: dict[int, _SentVerify] = {}
    done: dict[int, VerificationRound] = {}
    for each in seen:
        match each.message:
            case Grow() as grow:
                growth.add(grow, Step(each.incarnation, each.serial))
            case Verify(round=round) as verify if round not in asked:
                asked[round] = _sent_verify(verify, each.at, growth)
            case Verdict(round=round) as verdict if round in asked and round not in done:
                done[round] = _round(asked[round], each.at, verdict, growth)
            case Reroot(round=round) if round - 1 in done:
                done[round - 1].hit = not each.message.missed
    return list(done.values())


def acceptance_by_depth(rounds: Sequence[VerificationRound]) -> tuple[float, ...]:
    """Of the rounds that could accept a token so deep (1 is the first below the root), the share that did."""
    deepest = max((each.tried for each in rounds), default=0)
    tried = [sum(each.tried >= depth for each in rounds) for depth in range(1, deepest + 1)]
    accepted = [sum(each.accepted >= depth for each in rounds) for depth in range(1, deepest + 1)]
    return tuple(right / all for right, all in zip(accepted, tried, strict=True))


class _Growth:
    """The orchestrator's knowledge of the draft's growth steps, and the accepted path."""

    def __init__(self) -> None:
        self._published: set[NodeId] = set()
        self._evaluated: dict[NodeId, Step] = {}
        """The step that evaluated a node, and so found its children."""
        self._chosen: dict[NodeId, _Chosen] = {}

    def add(self, grow: Grow, step: Step) -> None:
        for parent, token in zip(grow.parents, grow.tokens, strict=True):
            self._published.add(node_id(parent, token))
            if grow.evaluated:
                self._evaluated.setdefault(parent, step)

    def step_of(self, parent: NodeId, child: NodeId) -> Step | None:
        """The step that has published `child` by now."""
        return self._evaluated.get(parent) if child in self._published else None

    def choose(self, path: Sequence[NodeId]) -> None:
        """The target chose this path behind its first node."""
        for parent, child in pairwise(path):
            ahead = child in self._evaluated
            self._chosen.setdefault(child, _Chosen(parent, self.step_of(parent, child), ahead))

    def steps_behind(self, node: NodeId) -> set[Step]:
        """The step that published this chosen node, and those that made it possible ahead of the target."""
        steps: set[Step] = set()
        known = self._chosen.get(node)
        while known is not None and known.step is not None:
            steps.add(known.step)
            above = self._chosen.get(known.parent)
            known = above if above is not None and above.ahead else None
        return steps


class _Chosen(NamedTuple):
    """A token of the output, as it was when the target chose it."""

    parent: NodeId
    step: Step | None
    """The step that had published it, if one had."""
    ahead: bool
    """The draft had evaluated it already."""


class _SentVerify(NamedTuple):
    """A Verify, its time, and the step that each node below its root came from."""

    verify: Verify
    at: int
    steps: dict[NodeId, Step | None]


def _sent_verify(verify: Verify, at: int, growth: _Growth) -> _SentVerify:
    return _SentVerify(verify, at, {child: growth.step_of(parent, child) for parent, child in _below(verify)})


def _round(sent: _SentVerify, answered: int, verdict: Verdict, growth: _Growth) -> VerificationRound:
    verify, steps = sent.verify, sent.steps
    path = [verify.root, *verdict.path]
    growth.choose([*path, node_id(path[-1], verdict.bonus)])
    grown = [node for node in verdict.path if steps.get(node) is not None]
    accepted = len(verdict.path)
    return VerificationRound(
        round=verify.round,
        asked=sent.at,
        answered=answered,
        nodes=len(verify.tokens) - 1,
        accepted=accepted,
        tried=accepted + any(parent == path[-1] for parent, _ in _below(verify)),
        sources={step for step in steps.values() if step is not None},
        accepted_from={step for node in grown if (step := steps[node]) is not None},
        used=set().union(*(growth.steps_behind(node) for node in grown)),
    )


def _below(verify: Verify) -> list[tuple[NodeId, NodeId]]:
    """Parent and child for every node under verification."""
    ids = [verify.root]
    pairs = []
    for token, parent in zip(verify.tokens[1:], verify.parents[1:], strict=True):
        ids.append(node_id(ids[parent], token))
        pairs.append((ids[parent], ids[-1]))
    return pairs
