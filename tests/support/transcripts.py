"""A simulated run as text: each event with its time, and below it the commands in their order."""

import re
from collections.abc import Iterable
from itertools import groupby

from orchestrator.core.commands import (
    Command,
    Dismiss,
    Emit,
    Finish,
    Pardon,
    Place,
    Reject,
    Release,
    Replace,
    SendMessage,
    TellReading,
    TrialDecided,
)
from orchestrator.core.events import Arrived, Ended, Event, Submitted, Tick, WorkerDown, WorkerUp
from protocol.messages.worker import (
    Extend,
    Fault,
    Forest,
    FromWorker,
    Grow,
    Prefilled,
    Reroot,
    Start,
    Stop,
    ToWorker,
    Verdict,
    Verify,
)


def transcript(history: Iterable[tuple[float, Event, list[Command]]]) -> str:
    """Growth that leads to nothing is counted, and so are events that repeat the one before but for its numbers."""
    blocks: list[str] = []
    silent = 0
    for now, event, commands in history:
        if isinstance(event, Arrived) and isinstance(event.message, Grow) and not commands:
            silent += 1
            continue
        steps = [f"{'':8}({silent} growth steps)"] if silent else []
        silent = 0
        lines = [*steps, f"{now * 1000:7.1f} {_event(event)}", *(f"{'':12}{_command(command)}" for command in commands)]
        blocks.append("\n".join(lines))
    lines = []
    for _, run in groupby(blocks, lambda block: re.sub(r"\d+", "", block)):
        first, *others = run
        lines += [first, *others] if len(others) < 2 else [first, f"{'':8}({len(others)} more times)"]
    return "\n".join([*lines, ""])


def _event(event: Event) -> str:
    match event:
        case Submitted(sequence, request):
            return f"submit {sequence}: {len(request.tokens)} tokens, {request.max_tokens} more"
        case Ended(sequence, reason):
            return f"end {sequence}: {reason}"
        case WorkerUp(incarnation, hello, remote):
            return f"{hello.role} {incarnation} up{' on another machine' if remote else ''}"
        case WorkerDown(role, incarnation):
            return f"{role} {incarnation} down"
        case Arrived(role, incarnation, message):
            return f"{role} {incarnation}: {_report(message)}"
        case Tick():
            return "tick"


def _report(message: FromWorker) -> str:
    match message:
        case Prefilled(sequence, round, tokens):
            return f"{sequence} has read {tokens} tokens, round {round}"
        case Verdict(sequence, round, path):
            return f"verdict {sequence}, round {round}: {len(path)} accepted"
        case Grow(sequence, round, parents):
            return f"growth {sequence}, round {round}: {len(parents)} nodes"
        case Fault(sequence, kind):
            return f"fault {sequence}: {kind}"
        case _:
            return type(message).__name__


def _command(command: Command) -> str:
    match command:
        case SendMessage(role, message, incarnation):
            return f"> {role}{'' if incarnation is None else f' {incarnation}'}: {_order(message)}"
        case Emit(sequence, tokens, hit):
            return f"client {sequence}: {len(tokens)} tokens{', a hit' if hit else ''}"
        case TellReading(sequence, tokens, total):
            return f"client {sequence}: {tokens} of {total} tokens read"
        case Finish(sequence, reason):
            return f"client {sequence}: {reason}"
        case Reject(sequence, text):
            return f"client {sequence}: rejected: {text.split('.')[0]}"
        case Replace(role, incarnation, reason):
            return f"replace {role} {incarnation}: {reason}"
        case Dismiss(role, incarnation):
            return f"dismiss {role} {incarnation}"
        case Pardon():
            return "pardon"
        case Release(name):
            return f"release {name}"
        case Place(shared_device):
            return f"place {'on one device' if shared_device else 'apart'}"
        case TrialDecided(winner, loser):
            return f"draft {winner} wins over {loser}"


def _order(message: ToWorker) -> str:
    match message:
        case Start(sequence, round, tokens):
            return f"start {sequence}, round {round}, {len(tokens)} tokens"
        case Verify(sequence, round):
            return f"verify {sequence}, round {round}: {len(message.tokens) - 1} nodes"
        case Forest(trees):
            return "verify together: " + ", ".join(f"{tree.request} ({len(tree.tokens) - 1})" for tree in trees)
        case Reroot(sequence, round):
            return f"reroot {sequence}, round {round}, {'missed' if message.missed else 'a hit'}"
        case Extend(sequence, round, steps):
            return f"extend {sequence}, round {round}, to {steps} steps"
        case Stop(sequence):
            return f"stop {sequence}"
        case _:
            return type(message).__name__
