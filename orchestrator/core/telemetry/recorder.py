"""What the pipeline did last, for whoever watches it: folded from the state machine's events and commands. Pure.

The machine knows nothing of it, and nothing here changes what the machine does.
"""

from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from typing import Literal, TypeVar

from orchestrator.core.commands import Command, Emit, Finish, SendMessage
from orchestrator.core.events import Arrived, Event
from orchestrator.core.machine import Machine
from orchestrator.core.sequence import Sequence
from orchestrator.core.telemetry.snapshot import request_list, snapshot, verification_snapshot
from protocol.messages.base import SequenceId
from protocol.messages.telemetry import (
    MOST_CHARACTERS,
    MOST_JUDGED,
    MOST_OVER,
    MOST_SPANS,
    FinishedRequest,
    TelemetryFrame,
    TreeSnapshot,
    VerifiedRound,
    WorkerSummary,
    WorkSpan,
)
from protocol.messages.worker import Forest, Grow, Prefilled, Verdict, Verify
from protocol.speculation.token_tree import node_id

T = TypeVar("T")

_LONGEST = 60.0
"""Seconds: a worker may claim any time for its work."""


class TelemetryRecorder:
    """Remembers a bounded number of spans and rounds, each with a serial number, so that several watchers may each
    be told what is new to them."""

    def __init__(self, machine: Machine, text: Callable[[int], str]) -> None:
        """`text` of a single token."""
        self.serial = 1
        """Of the last thing that happened; goes on while nobody watches, but then counts nothing."""
        self._machine = machine
        self._text = lambda token: text(token)[:MOST_CHARACTERS]
        self._spans: deque[tuple[int, WorkSpan]] = deque(maxlen=2 * MOST_SPANS)
        self._judged: deque[tuple[int, VerifiedRound]] = deque(maxlen=2 * MOST_JUDGED)
        self._over: deque[tuple[int, FinishedRequest]] = deque(maxlen=MOST_OVER)
        self._asked: dict[SequenceId, tuple[Verify, TreeSnapshot]] = {}
        """What is under verification, and what the draft thought of it then."""

    def clear(self) -> None:
        """Forget everything: nobody watches any more, and what comes next will not be told of here."""
        self._spans.clear()
        self._judged.clear()
        self._over.clear()
        self._asked.clear()

    def saw(self, event: Event, commands: Items[Command], now: float) -> None:
        """The machine has answered `event` with `commands`."""
        self.serial += 1
        if isinstance(event, Arrived):
            self._heard(event, commands, now)
        for command in commands:
            for verify in _questions(command):
                self._asks(verify)
            if isinstance(command, Finish):
                over = FinishedRequest(sequence=command.sequence, end=now, statistics=command.statistics)
                self._over.append((self.serial, over))

    def scene(self, after: int, wanted: SequenceId | None, now: float) -> TelemetryFrame:
        """What came after the serial number `after`, and how everything stands."""
        # A number from another life of the orchestrator says nothing here.
        after = after if after <= self.serial else 0
        spans, judged = _since(self._spans, after), _since(self._judged, after)
        shown = self._shown(wanted)
        self._asked = {id: asked for id, asked in self._asked.items() if id in self._machine.sequences}
        return TelemetryFrame(
            serial=self.serial,
            at=now,
            lost=max(0, len(spans) - MOST_SPANS) + max(0, len(judged) - MOST_JUDGED),
            drafts=self._machine.strategy.drafts,
            workers=tuple(self._workers()),
            requests=request_list(self._machine.sequences, shown, now),
            shown=None if shown is None else snapshot(shown, self._text),
            judged=tuple(judged[-MOST_JUDGED:]),
            spans=tuple(spans[-MOST_SPANS:]),
            over=tuple(_since(self._over, after)),
        )

    # What happened ----------------------------------------------------------------------------

    def _heard(self, event: Arrived, commands: Items[Command], now: float) -> None:
        match event.message:
            case Grow() as growth if growth.evaluated:
                self._worked(event, "grow", growth.sequence, growth.seconds, growth.evaluated, now)
            case Prefilled() as prefilled if prefilled.tokens:
                self._worked(event, "prefill", prefilled.sequence, prefilled.seconds, prefilled.tokens, now)
            case Verdict() as verdict:
                emitted = [one for one in commands if isinstance(one, Emit) and one.sequence == verdict.sequence]
                # A verdict that was not acted on moved nothing.
                if emitted:
                    self._judge(event, verdict, emitted[0], now)
            case _:
                pass

    def _asks(self, verify: Verify) -> None:
        sequence = self._machine.sequences.get(verify.sequence)
        if sequence is not None:
            self._asked[verify.sequence] = verify, verification_snapshot(verify, sequence.tree, self._text)

    def _judge(self, event: Arrived, verdict: Verdict, emit: Emit, now: float) -> None:
        asked = self._asked.pop(verdict.sequence, None)
        if asked is None or asked[0].round != verdict.round:
            # It was asked before anybody watched.
            return
        verify, sent = asked
        kept = len(verdict.path)
        self._worked(event, "verify", verify.sequence, verdict.seconds, len(verify.tokens), now, kept)
        judged = VerifiedRound(
            sequence=verify.sequence,
            round=verify.round,
            begin=now - min(verdict.seconds, _LONGEST),
            end=now,
            sent=sent,
            width=len(verify.tokens),
            accepted=_path(verify, verdict, len(sent.texts)),
            tokens=len(emit.tokens),
            bonus=self._text(verdict.bonus),
            hit=emit.hit,
        )
        self._judged.append((self.serial, judged))

    def _worked(
        self,
        event: Arrived,
        kind: Literal["grow", "verify", "prefill"],
        sequence: SequenceId,
        seconds: float,
        tokens: int,
        now: float,
        kept: int = 0,
    ) -> None:
        span = WorkSpan(
            role=event.role,
            incarnation=event.incarnation,
            kind=kind,
            sequence=sequence,
            begin=now - min(seconds, _LONGEST),
            end=now,
            tokens=tokens,
            kept=kept,
        )
        self._spans.append((self.serial, span))

    # How it stands ----------------------------------------------------------------------------

    def _shown(self, wanted: SequenceId | None) -> Sequence | None:
        """The wanted request, or the latest."""
        sequences = self._machine.sequences
        if wanted is not None and wanted in sequences:
            return sequences[wanted]
        return sequences[max(sequences)] if sequences else None

    def _workers(self) -> Iterable[WorkerSummary]:
        statuses = self._machine.draft_statuses()
        for incarnation, hello, guest in self._machine.workers():
            yield WorkerSummary(
                role=hello.role,
                incarnation=incarnation,
                engine=hello.engine,
                model=hello.model.rsplit("/", 1)[-1],
                device=hello.device,
                guest=guest,
                status=statuses.get(incarnation) if hello.role == "draft" else None,
            )


def _questions(command: Command) -> tuple[Verify, ...]:
    """What a command has the target verify."""
    match command:
        case SendMessage("target", Verify() as verify):
            return (verify,)
        case SendMessage("target", Forest(trees)):
            return trees
        case _:
            return ()


def _since(happened: Iterable[tuple[int, T]], after: int) -> list[T]:
    return [one for serial, one in happened if serial > after]


def _path(verify: Verify, verdict: Verdict, shown: int) -> tuple[int, ...]:
    """Entries of the tree that the verdict kept, as far as they are shown."""
    ids = [verify.root]
    for token, parent in zip(verify.tokens[1:shown], verify.parents[1:shown], strict=True):
        ids.append(node_id(ids[parent], token))
    entries = {id: index for index, id in enumerate(ids)}
    return tuple(entries[id] for id in verdict.path if id in entries)
