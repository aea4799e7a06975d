"""What a message takes to another process and back, as the pipeline sends it, by class of service and by pause.

`python -m orchestrator.lab.first_light.hops ORDER` is the other process, which sends back what comes.
"""

import sys
import tempfile
import time
from statistics import median

import msgspec
import zmq

from orchestrator.lab.findings import Answer, Cell, Column, Findings, Table
from orchestrator.lab.first_light.stages import Asked
from orchestrator.machine.conditions import conditions
from protocol.child_process import ChildProcess, module_command
from protocol.errors import PipelineError
from protocol.processes import QualityOfService, set_quality_of_service

_PAUSES = (0.0, 0.02)
"""Seconds between two messages: none, and a target's forward."""
_SILENCE = 30_000
"""Milliseconds."""
_CLASSES = (None, QualityOfService.USER_INTERACTIVE)
"""A thread that has one can't go back."""


class HopOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The last argument of the process, in JSON."""

    address: str
    quality: QualityOfService | None


def main() -> int:
    order = msgspec.json.decode(sys.argv[-1], type=HopOrder)
    if order.quality is not None:
        set_quality_of_service(order.quality)
    with zmq.Context() as context, context.socket(zmq.PAIR) as link:
        link.connect(order.address)
        while link.poll(_SILENCE):
            link.send(link.recv())
    return 0


def measure(asked: Asked) -> Findings:
    rows: list[tuple[Cell, ...]] = []
    for quality in _CLASSES:
        name = "none" if quality is None else quality.name.lower().replace("_", " ")
        asked.notice(f"hops, class of service {name}")
        for pause in _PAUSES:
            taken = sorted(hops(quality, pause, asked.sized(20, 400)))
            rows.append((name, 1e3 * pause, 1e6 * median(taken) / 2, 1e6 * taken[99 * len(taken) // 100] / 2))
    text = (
        f"A hop's µs, as a median and the slowest of a hundred ({conditions().speed}): "
        + ", ".join(f"class {name} after {pause:g} ms {usual:.0f}, {most:.0f}" for name, pause, usual, most in rows)
        + ". On battery and in Low Power Mode, ask again: first-light --only hops --out OTHER."
    )
    figures = (Column("pause, ms", ".0f"), Column("a hop, µs", ".0f"), Column("99 of 100, µs", ".0f"))
    return Findings(
        tables=(Table("Hops", ("class of service", *figures), tuple(rows), "Half of a way there and back."),),
        answers=(Answer("hops", text),),
    )


def hops(quality: QualityOfService | None, pause: float, count: int) -> list[float]:
    """Seconds of so many ways there and back."""
    if quality is not None:
        set_quality_of_service(quality)
    with tempfile.TemporaryDirectory() as room, zmq.Context() as context, context.socket(zmq.PAIR) as link:
        link.linger, link.sndtimeo, link.rcvtimeo = 0, _SILENCE, _SILENCE
        address = f"ipc://{room}/hops"
        link.bind(address)
        order = msgspec.json.encode(HopOrder(address=address, quality=quality)).decode()
        with ChildProcess([*module_command("orchestrator.lab.first_light.hops"), order]) as process:
            taken: list[float] = []
            for _ in range(count + 1):
                time.sleep(pause)
                began = time.perf_counter()
                try:
                    link.send(b"0")
                    link.recv()
                except zmq.Again as error:
                    words = f"The other process did not answer. Its last words: {process.last_words}"
                    raise PipelineError(words) from error
                taken.append(time.perf_counter() - began)
            # The first one waits for the other process to start.
            return taken[1:]


if __name__ == "__main__":
    sys.exit(main())
