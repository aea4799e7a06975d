"""Rivals as contenders: an environment on first use, a process on the cores of the baseline, figures from its results.

It imports no MLX: the rival's program does, in the rival's environment.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import msgspec

from orchestrator.lab.bench.contender import Family, GenerationTask, TimedGeneration
from orchestrator.lab.bench.rivals.catalogue import RIVALS, Loop, Rival
from orchestrator.lab.bench.rivals.messages import RivalJob, RivalReady, RivalResult, RivalSetup
from orchestrator.machine.child_process import ChildProcess
from orchestrator.machine.downloads.environment import environment
from orchestrator.machine.downloads.package_index import Unavailable
from orchestrator.machine.hardware import usable_cores, worker_environment
from protocol.errors import InputError, PipelineError

M = TypeVar("M")
_TERMINATION_SECONDS = 5.0
LOADING_SECONDS = 20 * 60.0
"""Of a large target from a slow disk, several times over: a rival that takes longer hangs."""
JOB_SECONDS = 10 * 60.0
"""Of one generation, which takes seconds to a few minutes."""
_MIB = 1 << 20
PACED = "a paced run holds every forward to a device's time, and its loops compute forwards of their own"
"""Why a paced run has no rivals."""

OnRivalAbsent = Callable[[str, str], None]
"""Called with the name of a rival that can't run and with half a sentence: the reason."""


def open_rivals(
    names: Sequence[str],
    target: str,
    ends: Iterable[int],
    stack: ExitStack,
    on_start: Callable[[str], None],
    on_absent: OnRivalAbsent,
    drafters: Mapping[str, Path] = MappingProxyType({}),
) -> list["RivalContender"]:
    """The contenders of these rivals, loaded and idle; `stack` ends their processes. `target`: folder of the model.
    `drafters`: folders by the kind of drafter, for the loops that take one.

    A rival that can't be installed or that can't load the target has no contender.
    """
    contenders: list[RivalContender] = []
    for name in names:
        rival = RIVALS[name]
        try:
            process = stack.enter_context(_running(rival, target, drafters, on_start))
        except (Unavailable, InputError, PipelineError) as error:
            on_absent(name, str(error).rstrip("."))
            continue
        drafting = (loop for kind, folder in drafters.items() for loop in rival.drafter_loops(kind, folder.name))
        contenders += [RivalContender(process, loop, ends) for loop in (*rival.loops, *drafting)]
    return contenders


class RivalContender:
    """One loop of a rival."""

    family: Family = "rival"

    def __init__(self, process: "RivalProcess", loop: Loop, ends: Iterable[int]) -> None:
        self.name = loop.contender
        self._process = process
        self._loop = loop
        self._ends = tuple(ends)

    def generate(self, task: GenerationTask) -> TimedGeneration:
        loop = self._loop
        result = self._process.run(RivalJob(loop=loop.name, options=loop.options, ends=self._ends, **task._asdict()))
        # Like everyone's: the accepted draft tokens, and the first rejected one of each round.
        tried = sum(min(each.accepted + 1, each.drafted) for each in result.rounds)
        return TimedGeneration(
            tokens=result.tokens[: task.max_tokens],
            tokens_per_second=len(result.tokens) / result.seconds,
            tokens_per_round=len(result.tokens) / result.forwards,
            acceptance_rate=sum(each.accepted for each in result.rounds) / tried if tried else None,
            time_to_first_token=result.arrivals[0],
            total_time=result.arrivals[-1],
            arrivals=result.arrivals,
        )


class RivalProcess:
    """A running program. It is idle between jobs."""

    def __init__(self, name: str, process: ChildProcess) -> None:
        self._name = name
        self._process = process

    def await_ready(self) -> None:
        """Wait until the model is loaded. Raises PipelineError if the process ends or hangs instead."""
        self._received(RivalReady, LOADING_SECONDS)

    def run(self, job: RivalJob) -> RivalResult:
        """Raises PipelineError if the process ends or hangs instead."""
        try:
            self._process.send(job)
        except OSError as error:
            raise self._ended() from error
        return self._received(RivalResult, JOB_SECONDS)

    def _received(self, kind: type[M], seconds: float) -> M:
        try:
            line = self._process.line(seconds)
            return msgspec.json.decode(line or b"", type=kind)
        except TimeoutError:
            raise PipelineError(f"the process of {self._name} gave no answer for {seconds / 60:.0f} minutes") from None
        except msgspec.DecodeError as error:
            raise self._ended() from error

    def _ended(self) -> PipelineError:
        return PipelineError(f"the process of {self._name} ended; its last line: {self._process.last_words}")


@contextmanager
def _running(
    rival: Rival, target: str, drafters: Mapping[str, Path], on_start: Callable[[str], None]
) -> Iterator[RivalProcess]:
    """Raises Unavailable or InputError if there is no environment, PipelineError if it can't load the target."""
    python = environment(
        rival.name, rival.pins(), lambda size: on_start(f"{rival.name}: {size // _MIB:,} MiB installed on first use")
    )
    on_start(rival.name)
    cores = usable_cores()
    taken = {kind: str(folder) for kind, folder in drafters.items() if any(rival.drafter_loops(kind, ""))}
    setup = RivalSetup(target=str(Path(target).resolve()), drafters=taken, cores=cores)
    # Isolated: the user's PYTHONPATH must not add our packages to the rival's.
    command = [str(python), "-I", str(rival.program), msgspec.json.encode(setup).decode()]
    with ChildProcess(command, variables=worker_environment("target", cores), asked=True) as process:
        try:
            running = RivalProcess(rival.name, process)
            running.await_ready()
            yield running
        finally:
            process.end(_TERMINATION_SECONDS)
