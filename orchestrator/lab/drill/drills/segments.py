"""Owner, writer, attacher and resource trackers are killed in many cycles: no shared memory leaks."""

import os
import random
import select
import signal
import subprocess
import time
from contextlib import suppress

from orchestrator.lab.drill.outcome import DrillOutcome, OnStep
from orchestrator.lab.drill.processes import own_registry
from protocol.kv.segments import SegmentError, open_segment, sweep
from protocol.own_modules import module_command
from protocol.process_identity import start_time

PROMISE = "start/kill cycles, resource trackers killed too: 0 leaked segments"
_START_SECONDS = 0.5
"""Rough duration of a start: half of the cycles are killed within it, the others after the attacher has attached."""
_ATTACH_SECONDS = 20.0
_DRAIN_SECONDS = 5.0


class Cycle:
    """One run of an owner, a writer and an attacher, as they report it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [*module_command("orchestrator.lab.drill.drills.segment_processes"), "owner"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self.segments: list[str] = []
        self.attached = False
        self._pids = {self._process.pid}
        self._rest = b""

    def read(self, seconds: float, attach: bool = False) -> None:
        """Read their reports until `seconds` have passed, all have ended, or (`attach`) the attacher has attached."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + seconds
        while (
            not (attach and self.attached)
            and select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]
        ):
            data = os.read(self._process.stdout.fileno(), 4096)
            if not data:
                return
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                self._report(*line.decode().split())

    def kill(self, source: random.Random) -> None:
        """Kill the known processes in a random order, then the rest of the group."""
        known = list(self._pids)
        source.shuffle(known)
        for pid in known:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        # A process that is just being started belongs to the same group.
        while True:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                break
            if self._process.poll() is not None and not any(map(start_time, self._pids)):
                break
        self._process.wait()
        self.read(_DRAIN_SECONDS)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _report(self, what: str, value: str) -> None:
        if what == "segment":
            self.segments.append(value)
        elif what == "process":
            self._pids.add(int(value))
        self.attached = self.attached or what == "attached"


def run(count: int, seed: int, on_step: OnStep) -> DrillOutcome:
    """Start and kill `count` times; each start removes the segments that the cycle before left."""
    source = random.Random(seed)
    made: list[str] = []
    attached = 0
    with own_registry() as registry:
        for _ in range(count):
            cycle = Cycle()
            if source.random() < 0.5:
                cycle.read(_ATTACH_SECONDS, attach=True)
            else:
                cycle.read(source.uniform(0.0, _START_SECONDS))
            cycle.kill(source)
            made += cycle.segments
            attached += cycle.attached
            on_step()
        sweep()
        leaked = [name for name in made if _exists(name)]
        entries = [entry.name for entry in registry.glob("*")]
    failures = [f"seed {seed}: segment {name} leaked." for name in leaked]
    failures += [f"seed {seed}: the registry still lists {name}." for name in entries]
    measured = f"{count} cycles, {attached} killed while attached, {len(made)} segments, {len(leaked)} leaked"
    figures = {"cycles": count, "attached": attached, "segments": len(made), "leaked": len(leaked)}
    return DrillOutcome(PROMISE, measured, failures, (), figures)


def _exists(name: str) -> bool:
    try:
        open_segment(name).close()
    except SegmentError:
        return False
    return True
