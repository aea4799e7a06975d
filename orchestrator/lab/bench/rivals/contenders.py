"""Rivals as contenders: an environment on first use, a process on the cores of the baseline, figures from its results.

It imports no MLX: the rival's program does, in the rival's environment.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import msgspec

from orchestrator.lab.bench.contender import Family, GenerationTask, TimedGeneration
from orchestrator.lab.bench.names import LLAMA_CPP, contender_name
from orchestrator.machine.child_process import ChildProcess
from orchestrator.machine.downloads.environment import environment
from orchestrator.machine.downloads.package_index import Unavailable
from orchestrator.machine.hardware import installed_version, usable_cores, worker_environment
from protocol.errors import InputError, PipelineError


class RivalSetup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The one argument of the program, as JSON."""

    target: str
    """Folder of the model."""
    drafters: Mapping[str, str]
    """Folders of drafters for the loops that need one, by the loop's name."""
    cores: tuple[int, ...]
    """Processor cores to run on, where the OS allows it; empty for all."""


class RivalReady(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The program's first line: the model is loaded."""

    precision: str
    """How the weights are computed with."""


class RivalJob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Continue these tokens until `max_tokens` or one of the end tokens `ends`."""

    loop: str
    options: Mapping[str, int]
    tokens: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int
    ends: tuple[int, ...]


class RivalRound(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One verification of draft tokens."""

    drafted: int
    accepted: int


class RivalResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The result of a job."""

    tokens: tuple[int, ...]
    """May have more than `max_tokens`: a loop may end with the last token of a round."""
    seconds: float
    """By the rival's own clock, from the end of the prefill of all but the prompt's last token."""
    forwards: int
    """Of the target, in that time."""
    rounds: tuple[RivalRound, ...] = ()
    """Those with draft tokens."""
    arrivals: tuple[float, ...]
    """Seconds from the job's begin, prefill included, to each token."""


_LOOKUP_DRAFT_TOKENS = (3, 6, 12)
"""6 is mlx-dspark's default."""
_LOOKUP_LONG_DRAFT = 32
"""mlx-dspark's default: so many tokens after a long match."""
_DRAFTER_TOKENS = {"dspark": (1, 2, 3, 4, 7), "dflash": (1, 2, 3, 4, 7)}
"""2 is mlx-dspark's default for DSpark, 7 a whole block."""
_SHARED = ("mlx", "mlx-cpu", "mlx-metal", "mlx-cuda-12", "mlx-cuda-13", "mlx-lm", "transformers")
"""The rival runs the versions that the bench runs, so that neither has the better library."""


@dataclass(frozen=True, slots=True)
class Loop:
    """One loop of a rival with one setting."""

    contender: str
    """Its name in the table."""
    name: str
    """Its name for the program."""
    options: Mapping[str, int]
    """Keywords of the loop."""


@dataclass(frozen=True, slots=True)
class Rival:
    """Software with decoding loops of its own."""

    name: str
    packages: Mapping[str, str]
    """Pinned packages of its own, and their versions."""
    program: Path
    """Runs in the rival's environment and speaks `messages`."""
    loops: tuple[Loop, ...]
    """Those that need no drafter."""
    drafter_loops: Callable[[str, str], Iterator[Loop]]
    """Those for a kind of drafter, and its name in the table."""

    def pins(self) -> dict[str, str]:
        """All packages of its environment that have a fixed version."""
        shared = {package: installed_version(package) for package in _SHARED}
        return {package: version for package, version in shared.items() if version} | dict(self.packages)


def parse_rivals(text: str | None) -> tuple[str, ...]:
    """Names separated by commas; None for none. Raises InputError naming the unknown ones."""
    names = [name.strip() for name in (text or "").split(",") if name.strip()]
    known = (*RIVALS, LLAMA_CPP)
    unknown = [name for name in names if name not in known]
    if unknown or (text is not None and not names):
        raise InputError(f"There is no rival {', '.join(unknown) or repr(text)}: choose from {', '.join(known)}.")
    return tuple(dict.fromkeys(names))


def _mlx_dspark_loops() -> Iterator[Loop]:
    yield Loop("mlx-dspark greedy", "greedy", {})
    # Its default needs a match of three tokens; two are its other sensible choice.
    for line, shortest in (("mlx-dspark lookup", 3), ("mlx-dspark lookup, bigrams", 2)):
        for count in _LOOKUP_DRAFT_TOKENS:
            options = {"max_draft_tokens": count, "long_draft_tokens": _LOOKUP_LONG_DRAFT, "ngram_min": shortest}
            yield Loop(contender_name(line, count), "lookup", options)


def _mlx_dspark_drafter_loops(kind: str, name: str) -> Iterator[Loop]:
    """Each with as many tokens a round as may compete; a drafter of another kind has no loop."""
    for count in _DRAFTER_TOKENS.get(kind, ()):
        yield Loop(contender_name(f"mlx-dspark {name}", count), kind, {"max_draft_tokens": count})


_MLX_DSPARK = Rival(
    name="mlx-dspark",
    packages={"mlx-dspark": "0.20.3", "mlx-vlm": "0.7.10"},
    program=Path(__file__).with_name("mlx_dspark_program.py"),
    loops=tuple(_mlx_dspark_loops()),
    drafter_loops=_mlx_dspark_drafter_loops,
)
RIVALS: dict[str, Rival] = {_MLX_DSPARK.name: _MLX_DSPARK}
"""Those with a program of ours, which runs in an environment of theirs."""


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
