"""Replays a traced worker alone: the same messages and units of work in the same order. Knows no sockets."""

import gc
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from protocol.messages.worker import Start, ToWorker
from protocol.worker.interface import Worker, WorkerReply
from protocol.worker.tracing import Script, load_script, traced


def replay(build: Callable[[], Worker], script: Path, folder: Path) -> None:
    """Run a script and save the spans under its name in `folder`; the n-th span is that of the traced run's n-th."""
    with traced(build(), str(folder), script.stem) as worker:
        settle()
        run_script(worker, load_script(script))


def settle() -> None:
    """Exempt all loaded objects from garbage collection, and turn automatic collection off."""
    gc.collect()
    gc.freeze()
    gc.disable()


def run_script(worker: Worker, script: Script) -> None:
    """Run every step of `script` in order, and drop the replies."""
    for step in script:
        if step is not None:
            _drain(worker.handle(_without_adoption(step)))
        elif worker.has_work:
            _drain(worker.work())
        if isinstance(step, Start) and step.adopt is not None and step.plan is None:
            _prefill(worker)


def _prefill(worker: Worker) -> None:
    """Evaluate a prompt whose KV the traced target adopted."""
    while worker.has_work:
        _drain(worker.work())


def _without_adoption(message: ToWorker) -> ToWorker:
    """The message without its arena: the shared memory of the traced run is gone."""
    if isinstance(message, Start) and message.adopt is not None:
        return msgspec.structs.replace(message, adopt=None)
    return message


def _drain(replies: Iterable[WorkerReply]) -> None:
    for _ in replies:
        pass
