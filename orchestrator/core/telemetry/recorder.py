"""Records what the pipeline did last, from the state machine's events and commands. Pure.

The state machine does not know the recorder, and the recorder never changes what it does.
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
    MAX_CHARACTERS,
    MAX_ENDED,
    MAX_ROUNDS,
    MAX_SPANS,
    FinishedRequest,
    TelemetryFrame,
    TreeSnapshot,
    VerifiedRound,
    WorkerSummary,
    WorkSpan,
)
from protocol.messages.worker import Forest, Grow, Prefilled, Verdict, Verify
from protocol.shown_names import device_name, model_name
from protocol.speculation.token_tree import node_id

T = TypeVar("T")

_MAX_SECONDS = 60.0
"""Longest span: a worker may report any duration."""


class TelemetryRecorder:
    """Holds a bounded number of spans and rounds. Each has a serial number, so that every subscriber gets those that
    are new to it."""

    def __init__(self, machine: Machine, text: Callable[[int], str]) -> None:
        """`text` gives the text of a single token."""
        self.serial = 1
        """Counts recorded events; it stands still while nothing is recorded."""
        self._machine = machine
        self._text = lambda token: text(token)[:MAX_CHARACTERS]
        self._spans: deque[tuple[int, WorkSpan]] = deque(maxlen=2 * MAX_SPANS)
        self._verified: deque[tuple[int, VerifiedRound]] = deque(maxlen=2 * MAX_ROUNDS)
        self._ended: deque[tuple[int, FinishedRequest]] = deque(maxlen=MAX_ENDED)
        self._outstanding: dict[SequenceId, tuple[Verify, TreeSnapshot]] = {}
        """What is under verification, and the tree at the moment when it was sent."""

    def clear(self) -> None:
        """Forget everything: the last subscriber has left."""
        self._spans.clear()
        self._verified.clear()
        self._ended.clear()
        self._outstanding.clear()

    def record(self, event: Event, commands: Items[Command], now: float) -> None:
        """Record that the state machine answered `event` with `commands`."""
        self.serial += 1
        if isinstance(event, Arrived):
            self._record_result(event, commands, now)
        for command in commands:
            for verify in _verifies(command):
                self._record_verify(verify)
            if isinstance(command, Finish):
                ended = FinishedRequest(sequence=command.sequence, end=now, statistics=command.statistics)
                self._ended.append((self.serial, ended))

    def frame(self, after: int, wanted: SequenceId | None, now: float) -> TelemetryFrame:
        """What happened after the serial number `after`, and the present state; `wanted` is the request to select."""
        # A serial number of an earlier orchestrator process means nothing here.
        after = after if after <= self.serial else 0
        spans, verified = _since(self._spans, after), _since(self._verified, after)
        selected = self._selected(wanted)
        sequences = self._machine.sequences
        self._outstanding = {id: sent for id, sent in self._outstanding.items() if id in sequences}
        return TelemetryFrame(
            serial=self.serial,
            at=now,
            dropped=max(0, len(spans) - MAX_SPANS) + max(0, len(verified) - MAX_ROUNDS),
            uses_draft=self._machine.strategy.drafts,
            workers=tuple(self._workers()),
            requests=request_list(sequences, selected, now),
            selected=None if selected is None else snapshot(selected, self._text),
            verified=tuple(verified[-MAX_ROUNDS:]),
            spans=tuple(spans[-MAX_SPANS:]),
            ended=tuple(_since(self._ended, after)),
        )

    # What happened ----------------------------------------------------------------------------

    def _record_result(self, event: Arrived, commands: Items[Command], now: float) -> None:
        match event.message:
            case Grow() as growth if growth.evaluated:
                self._record_span(event, "grow", growth.sequence, growth.seconds, growth.evaluated, now)
            case Prefilled() as prefilled if prefilled.tokens:
                self._record_span(event, "prefill", prefilled.sequence, prefilled.seconds, prefilled.tokens, now)
            case Verdict() as verdict:
                emitted = [one for one in commands if isinstance(one, Emit) and one.sequence == verdict.sequence]
                # A verdict without an Emit was stale: it committed nothing.
                if emitted:
                    self._record_round(event, verdict, emitted[0], now)
            case _:
                pass

    def _record_verify(self, verify: Verify) -> None:
        sequence = self._machine.sequences.get(verify.sequence)
        if sequence is not None:
            tree = verification_snapshot(verify, sequence.tree, self._text)
            self._outstanding[verify.sequence] = verify, tree

    def _record_round(self, event: Arrived, verdict: Verdict, emit: Emit, now: float) -> None:
        outstanding = self._outstanding.pop(verdict.sequence, None)
        if outstanding is None or outstanding[0].round != verdict.round:
            # The Verify was sent before recording began.
            return
        verify, tree = outstanding
        accepted = len(verdict.path)
        self._record_span(event, "verify", verify.sequence, verdict.seconds, len(verify.tokens), now, accepted)
        verified = VerifiedRound(
            sequence=verify.sequence,
            round=verify.round,
            begin=now - min(verdict.seconds, _MAX_SECONDS),
            end=now,
            tree=tree,
            width=len(verify.tokens),
            accepted=_accepted(verify, verdict, len(tree.texts)),
            committed=len(emit.tokens),
            bonus=self._text(verdict.bonus),
            hit=emit.hit,
        )
        self._verified.append((self.serial, verified))

    def _record_span(
        self,
        event: Arrived,
        kind: Literal["grow", "verify", "prefill"],
        sequence: SequenceId,
        seconds: float,
        tokens: int,
        now: float,
        accepted: int = 0,
    ) -> None:
        span = WorkSpan(
            role=event.role,
            incarnation=event.incarnation,
            kind=kind,
            sequence=sequence,
            begin=now - min(seconds, _MAX_SECONDS),
            end=now,
            tokens=tokens,
            accepted=accepted,
        )
        self._spans.append((self.serial, span))

    # The present state ------------------------------------------------------------------------

    def _selected(self, wanted: SequenceId | None) -> Sequence | None:
        """The wanted request, or else the latest."""
        sequences = self._machine.sequences
        if wanted is not None and wanted in sequences:
            return sequences[wanted]
        return sequences[max(sequences)] if sequences else None

    def _workers(self) -> Iterable[WorkerSummary]:
        statuses = self._machine.drafts.statuses()
        for incarnation, hello, remote in self._machine.workers():
            yield WorkerSummary(
                role=hello.role,
                incarnation=incarnation,
                engine=hello.engine,
                model=model_name(hello.model),
                device=device_name(hello.device),
                remote=remote,
                status=statuses.get(incarnation) if hello.role == "draft" else None,
            )


def _verifies(command: Command) -> tuple[Verify, ...]:
    """All Verify messages that a command sends to the target."""
    match command:
        case SendMessage("target", Verify() as verify):
            return (verify,)
        case SendMessage("target", Forest(trees)):
            return trees
        case _:
            return ()


def _since(recorded: Iterable[tuple[int, T]], after: int) -> list[T]:
    return [one for serial, one in recorded if serial > after]


def _accepted(verify: Verify, verdict: Verdict, entries: int) -> tuple[int, ...]:
    """The accepted path as entries of the verified tree, whose first `entries` nodes are in the snapshot."""
    ids = [verify.root]
    for token, parent in zip(verify.tokens[1:entries], verify.parents[1:entries], strict=True):
        ids.append(node_id(ids[parent], token))
    index = {id: entry for entry, id in enumerate(ids)}
    return tuple(index[id] for id in verdict.path if id in index)
