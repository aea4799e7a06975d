"""What outlives a draft's process: the measurements of the draft, and the arenas that it wrote. Pure."""

import math
from bisect import bisect_left, bisect_right

from orchestrator.core.commands import Command, Release
from orchestrator.core.estimates import Estimates, MeasuredCost, TurnTaking
from orchestrator.core.events import Task
from orchestrator.core.tuning import TUNING
from protocol.messages.base import RequestId
from protocol.messages.kv import KvOffer, KvReference
from protocol.messages.worker import Hello, Prefilled

_MAX_ABSENT = 16


class DraftHistory:
    """The measurements and arenas of one draft. Greedy and sampled requests are measured apart, and the target's
    forwards also by the length of the context: attention to it costs more or less by the width."""

    def __init__(self, base: "DraftHistory | None" = None, turns: TurnTaking | None = None) -> None:
        """`base`: the history whose measurements of the target are shared."""
        self.arenas = DraftArenas()
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
            found = target.with_another_draft(self.turns)
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
        self._present: list[DraftHistory] = []

    @property
    def warnings(self) -> int:
        """Arenas that drafts, present or absent, could not adopt."""
        return sum(history.arenas.warnings for history in (*self._present, *self._absent.values()))

    def take(self, hello: Hello, turns: TurnTaking) -> DraftHistory:
        """The history of a draft that came up; `turns` is the mode that a new one begins in."""
        history = self._absent.pop(_identity(hello), None) or DraftHistory(self.without_draft, turns)
        history.expect_draft(hello)
        self._present.append(history)
        return history

    def store(self, hello: Hello, history: DraftHistory) -> list[Command]:
        """Store the history of a draft that is gone. Returns commands that unlink unused arenas."""
        self._present.remove(history)
        commands = history.arenas.draft_down()
        evicted = self._absent.pop(_identity(hello), None)
        self._absent[_identity(hello)] = history
        if evicted is None and len(self._absent) > _MAX_ABSENT:
            evicted = self._absent.pop(next(iter(self._absent)))
        return commands if evicted is None else [*commands, *evicted.arenas.clear()]

    def request_ended(self, request: RequestId) -> None:
        for history in (*self._present, *self._absent.values()):
            history.arenas.request_ended(request)


class DraftArenas:
    """Arenas with a draft's KV of live requests, which the draft's next incarnation can adopt.

    While the draft is up, it reuses the arena of an ended request for another one. When the draft is gone, the arenas
    of live requests stay and the others are unlinked.
    """

    def __init__(self) -> None:
        self.warnings = 0
        """Arenas that the draft could not adopt, or did not survive adopting twice."""
        self._present: dict[RequestId, KvReference] = {}
        """Arenas of the present incarnation."""
        self._adoptable: dict[RequestId, KvReference] = {}
        """Arenas of earlier incarnations, not adopted yet."""
        self._unanswered: set[RequestId] = set()
        """Requests whose arena the present incarnation was told to adopt, and has not answered for."""
        self._suspected: set[str] = set()
        """Arenas whose adoption an incarnation did not survive."""
        self._names: set[str] = set()
        """Names of all arenas that were offered and not unlinked."""
        self._shared: dict[RequestId, str] = {}
        """By request: the target's arena that the present incarnation was told to adopt, and has not answered for."""
        self._refused: set[str] = set()
        """The target's arenas that two incarnations did not survive adopting."""

    def add(self, offer: KvOffer, live: bool) -> None:
        """Add an offered arena; `live`: its request has not ended yet."""
        self._names.add(offer.name)
        if live:
            self._present[offer.request] = KvReference(offer.name, offer.tokens)

    def draft_down(self) -> list[Command]:
        """Keep the arenas of live requests. Returns commands that unlink the others.

        An arena that two incarnations did not survive adopting is adopted by no third one.
        """
        names = set(self._shared.values())
        self._refused |= names & self._suspected
        self._suspected |= names
        self._shared = {}
        given_up = {id for id in self._unanswered if id in self._present and self._present[id].name in self._suspected}
        self._suspected |= {self._present[id].name for id in self._unanswered if id in self._present}
        self.warnings += len(given_up)
        self._adoptable |= {id: arena for id, arena in self._present.items() if id not in given_up}
        self._present, self._unanswered = {}, set()
        used = {reference.name for reference in self._adoptable.values()}
        unused = sorted(self._names - used)
        self._names &= used
        return [Release(name) for name in unused]

    def adopt(self, request: RequestId) -> KvReference | None:
        """The arena of an earlier incarnation that the present one is to adopt for this request."""
        reference = self._adoptable.pop(request, None)
        if reference is not None:
            self._present[request] = reference
            self._unanswered.add(request)
        return reference

    def share(self, request: RequestId, reference: KvReference | None) -> KvReference | None:
        """The arena of the target's, if this draft may be told to adopt it."""
        if reference is None or reference.name in self._refused:
            return None
        self._shared[request] = reference.name
        return reference

    def note_adoption(self, message: Prefilled) -> None:
        """The draft has answered an adoption. An arena that it could not adopt is unlinked when the draft is gone."""
        self._suspected.discard(self._shared.pop(message.request, ""))
        self._unanswered.discard(message.request)
        if message.request in self._present:
            self._suspected.discard(self._present[message.request].name)
        if message.warning:
            self.warnings += 1
            self._present.pop(message.request, None)

    def clear(self) -> list[Command]:
        """No further incarnation can adopt these arenas. Returns commands that unlink them."""
        self._present, self._adoptable = {}, {}
        return self.draft_down()

    def request_ended(self, request: RequestId) -> None:
        self._shared.pop(request, None)
        self._unanswered.discard(request)
        self._present.pop(request, None)
        self._adoptable.pop(request, None)


def _identity(hello: Hello) -> tuple[str, str, str]:
    return hello.engine, hello.model, hello.device
