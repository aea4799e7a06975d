"""A worker does again, alone, what a traced one did: the same messages and units of work in the same order.

Knows no sockets: nothing is sent, and nobody else is at work.
"""

import gc
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from protocol.messages.worker import Start, ToWorker
from protocol.worker.interface import Worker, WorkerReply
from protocol.worker.tracing import Script, load_script, traced


def replay(build: Callable[[], Worker], script: Path, folder: Path) -> None:
    """Run a script and save the spans under its name in `folder`: the n-th span is the n-th of the traced run."""
    with traced(build(), str(folder), script.stem) as worker:
        settle()
        run_script(worker, load_script(script))


def settle() -> None:
    """What has been loaded stays: from here on the garbage collector runs only when there is nothing to do."""
    gc.collect()
    gc.freeze()
    gc.disable()


def run_script(worker: Worker, script: Script) -> None:
    """Every step of it, one after the other; replies go nowhere."""
    for step in script:
        if step is not None:
            _drain(worker.handle(_alone(step)))
        elif worker.has_work:
            _drain(worker.work())
        if isinstance(step, Start) and step.adopt is not None and step.plan is None:
            _read_prompt(worker)


def _read_prompt(worker: Worker) -> None:
    """A target's: what it adopted has to be evaluated here."""
    while worker.has_work:
        _drain(worker.work())


def _alone(message: ToWorker) -> ToWorker:
    """Shared memory of the traced run is gone."""
    if isinstance(message, Start) and message.adopt is not None:
        return msgspec.structs.replace(message, adopt=None)
    return message


def _drain(replies: Iterable[WorkerReply]) -> None:
    for _ in replies:
        pass
