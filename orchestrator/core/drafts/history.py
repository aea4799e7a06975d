"""What outlives a draft's process: the measurements of the draft. Pure."""

import math
from bisect import bisect_left, bisect_right

from orchestrator.core.estimates import Estimates, MeasuredCost, TurnTaking
from orchestrator.core.events import Task
from orchestrator.core.tuning import TUNING
from protocol.messages.worker import Hello
from protocol.speculation.token_tree import Calibration

_MAX_ABSENT = 16


class DraftHistory:
    """The measurements of one draft. Greedy and sampled requests are measured apart, and the target's
    forwards also by the length of the context: attention to it costs more or less by the width."""

    def __init__(self, base: "DraftHistory | None" = None, turns: TurnTaking | None = None) -> None:
        """`base`: the history whose measurements of the target are shared."""
        self.turns = turns or TurnTaking()
        self._base = base
        self._estimates: dict[tuple[bool, int], Estimates] = {}
        """By whether the requests are greedy, and by the class of their contexts."""
        self._target: Hello | None = None
        self._draft: Hello | None = None

    def estimates(self, task: Task, context: int) -> Estimates:
        """Of a request with so many tokens, prompt and answer."""
        return self._of(task.sampling.temperature == 0, bisect_right(TUNING.lengths, context))

    def expect_target(self, hello: Hello) -> None:
        """The costs that a target measured replace those of an earlier target, for all drafts."""
        self._target = hello
        for (_, length), estimates in self._estimates.items():
            estimates.expect_target(costs_behind(hello, TUNING.typical[length]))

    def expect_draft(self, hello: Hello) -> None:
        """The costs that a new life of this draft measured replace those of the earlier one."""
        self._draft = hello
        for estimates in self._estimates.values():
            estimates.expect_draft(hello)

    def _of(self, greedy: bool, length: int) -> Estimates:
        found = self._estimates.get((greedy, length))
        if found is not None:
            return found
        if self._base is None:
            target = Estimates()
            if self._target is not None:
                target.expect_target(costs_behind(self._target, TUNING.typical[length]))
        else:
            target = self._base._of(greedy, length)
        if length:
            found = self._of(greedy, 0).with_costs_of(target)
        else:
            found = target.with_another_draft(self.turns, Calibration(1.0 if greedy else TUNING.sampled_claims))
            if self._draft is not None:
                found.expect_draft(self._draft)
        found.longest = TUNING.lengths[length] if length < len(TUNING.lengths) else math.inf
        self._estimates[greedy, length] = found
        return found


def costs_behind(hello: Hello, context: int) -> list[MeasuredCost]:
    """What a target measured, with what so many tokens of context add: of a width for which that was not measured, by
    a line between those on both sides, since the target measures on both sides of the steps; beyond the widest, as much
    as there."""
    added = hello.context_costs
    if not added or not context:
        return list(hello.costs)
    widths = [width for width, _ in added]

    def a_thousand(width: int) -> float:
        index = bisect_left(widths, width)
        if index in (0, len(widths)):
            return added[min(index, len(widths) - 1)][1]
        (narrow, less), (wide, more) = added[index - 1 : index + 1]
        return less + (more - less) * (width - narrow) / (wide - narrow)

    return [(width, seconds + a_thousand(width) * context / 1000) for width, seconds in hello.costs]


class DraftHistories:
    """A draft with the same engine, model and device name as an earlier one continues the earlier draft's history.

    Two such drafts that are up at the same time share nothing.
    """

    def __init__(self) -> None:
        self.without_draft = DraftHistory()
        self._absent: dict[tuple[str, str, str], DraftHistory] = {}
        """Least recently seen first."""

    def take(self, hello: Hello, turns: TurnTaking) -> DraftHistory:
        """The history of a draft that came up; `turns` is the mode that a new one begins in."""
        history = self._absent.pop(_identity(hello), None) or DraftHistory(self.without_draft, turns)
        history.expect_draft(hello)
        return history

    def store(self, hello: Hello, history: DraftHistory) -> None:
        """Store the history of a draft that is gone."""
        self._absent.pop(_identity(hello), None)
        self._absent[_identity(hello)] = history
        if len(self._absent) > _MAX_ABSENT:
            del self._absent[next(iter(self._absent))]


def _identity(hello: Hello) -> tuple[str, str, str]:
    return hello.engine, hello.model, hello.device
