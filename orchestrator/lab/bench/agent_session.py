"""A session of an agent with a network of a real model's shape: what is reused of each prompt, and in how much memory.

The text is random. The memory for KV is what a Mac has for the real model, scaled as the prompts are: the smallest Mac
that keeps both conversations of the session. Windows and recurrent states have the real size.
"""

import os
import random
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

from orchestrator.api.pipeline import Pipeline
from orchestrator.api.sampling import UNFILTERED, SamplingParams
from orchestrator.core.options import Options
from orchestrator.lab.bench.shapes import WEIGHTS, configuration, write_shape
from orchestrator.lab.findings import Field, Findings, Listener, tabulated
from orchestrator.lab.report import machine_lines
from orchestrator.machine.check import Check
from orchestrator.machine.hardware import computes_on_processor
from orchestrator.machine.memory.budget import GIB, TARGET, MemorySettings, ModelNeed, PipelineNeeds
from orchestrator.machine.memory.kv_form import attention_heads, kv_form
from orchestrator.machine.memory.kv_plan import CONVERSATION, kv_plan
from protocol.common_prefix import common_prefix
from protocol.contracts.model_folder import stated_positions
from protocol.errors import InputError
from protocol.paths import PREFIXES_VARIABLE, SEGMENTS_VARIABLE, SHARED_MEMORY, cache_folder, segments_folder

_AGENT_FIRST = 25_000
_ADDED = 300, 2_000
"""Tokens of an agent's first prompt, and of what a later turn adds."""
_REMINDER = 60
RESTART = "after a restart"
_ANSWER = 8
_MACS = {18: 12.7, 24: 17.8, 32: 24.0, 48: 36.0, 64: 48.0}
"""What macOS recommends for the GPU, GiB, by GB of memory."""
_STATES = 2
_WORDS = range(5, 400)
"""Token ids."""
_TOLERANCE = 1.05
"""Of the budget, that may be taken."""
_LOOK_SECONDS = 0.5
"""Between two looks at a process's memory."""
_FILES = 3
"""Of the disk cache, that are made and written at once."""
_SHORT = 32
"""Tokens that may be read again: behind the place of a recurrent state."""
_BLOCK = 256
"""Tokens of a file of the disk cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionTurn:
    """One prompt. Bytes are those after its answer."""

    kind: str
    prompt: int
    shared: int
    """Its first tokens that an earlier prompt or answer of the session has too."""
    cached: int
    first_token: float
    """Seconds from the request's arrival."""
    saving: float
    """Seconds in which the target saved KV before a round, the mean of the answer's rounds."""
    target: int
    """Memory of the target's process alone, beyond that before the first prompt."""
    most: int
    """The same at most, from the prompt to the answer."""
    orchestrator: int
    """The same of the orchestrator's."""
    shared_memory: int

    @property
    def read_again(self) -> int:
        """Tokens that were evaluated although they had been before."""
        return max(0, self.shared - self.cached)


class Session:
    """The prompts of a session. Each is known once the answer to the one before it is."""

    def __init__(self, first: int, turns: int, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._scale = first / _AGENT_FIRST
        self._first = first
        self._turns = turns
        self._served: list[list[int]] = []
        self.conversation: list[int] = self._text(first)
        self.rules = first * 4 // 5
        """Tokens that both conversations begin with."""

    def prompts(self) -> Iterator[tuple[str, list[int]]]:
        """A kind of turn and its prompt; `answered` has to be called before the next."""
        yield "first prompt", self.conversation
        ends: list[int] = [len(self.conversation)]
        for number in range(2, self._turns + 1):
            added = self._text(max(4, int(self._random.randint(*_ADDED) * self._scale)))
            kind = "turn"
            if number == self._turns // 3:
                kind = "a reminder in the middle"
                reminder = self._text(max(4, int(_REMINDER * self._scale)))
                self.conversation[ends[-1] - 4 : ends[-1] - 4] = reminder
            elif number == self._turns // 2:
                yield "another conversation", self.conversation[: self.rules] + self._text(self._first - self.rules)
            elif number == 2 * self._turns // 3 and len(ends) > 2:
                kind = "an edited turn"
                self.conversation = self.conversation[: ends[-2]]
            self.conversation = [*self.conversation, *added]
            ends.append(len(self.conversation))
            yield kind, self.conversation
        self.conversation = [*self.conversation, *self._text(max(4, int(_ADDED[0] * self._scale)))]
        yield RESTART, self.conversation

    def answered(self, kind: str, prompt: Sequence[int], answer: Sequence[int]) -> None:
        self._served.append([*prompt, *answer])
        if kind != "another conversation":
            self.conversation = [*prompt, *answer]

    def shared(self, prompt: Sequence[int]) -> int:
        """Of all tokens but the last one, which is always evaluated."""
        return max((common_prefix(prompt[:-1], served[:-1]) for served in self._served), default=0)

    def _text(self, tokens: int) -> list[int]:
        return self._random.choices(_WORDS, k=tokens)


class SessionMemory(NamedTuple):
    """What a session's pipeline has."""

    gb: int
    """Of the Mac whose memory it is."""
    tokens: int
    """Of conversations that it keeps, about."""
    kv: int
    """Bytes of their KV in this machine's target."""


def session_memory(shape: str, first: int, turns: int) -> SessionMemory:
    """Of the smallest Mac that keeps all that is said, or of the largest one."""
    wanted, found = _tokens_said(first, turns), SessionMemory(0, 0, 0)
    for gb in _MACS:
        kept = kept_tokens(shape, gb)
        tokens = kept * first // _AGENT_FIRST
        # Windows and states of each conversation are as large as ever.
        conversations = max(1.0, kept / CONVERSATION)
        found = SessionMemory(gb, tokens, int(conversations * kv_bytes(shape, int(tokens / conversations))))
        if tokens >= wanted:
            break
    return found


def _tokens_said(first: int, turns: int) -> int:
    """The most tokens of the session's two conversations."""
    session, longest = Session(first, turns), 0
    for kind, prompt in session.prompts():
        longest = max(longest, len(prompt) + _ANSWER)
        session.answered(kind, prompt, [0] * _ANSWER)
    return longest + first


def kept_tokens(shape: str, gb: int) -> int:
    """What a Mac keeps of conversations with the real model."""
    config = configuration(shape)
    weights, heads = int(WEIGHTS[shape] * GIB), attention_heads(config)
    needs = PipelineNeeds(
        models=(ModelNeed(TARGET, weights, kv_form(config), heads=heads, quantizes=True),),
        context=stated_positions(config) or _AGENT_FIRST,
        on_processor=False,
        processes=2,
    )
    return kv_plan(needs, MemorySettings(), int(_MACS[gb] * GIB), concurrent=16).tokens


def kv_bytes(shape: str, tokens: int) -> int:
    """Of one conversation in this machine's target."""
    form = kv_form(configuration(shape))
    assert form is not None
    return form.bytes(tokens, 4 if computes_on_processor() else 2, states=_STATES)


def measure_session(shape: str, watch: Listener, *, first: int, turns: int) -> Findings:
    """Every turn of one session, the last one in a pipeline that was started again with a disk cache.

    Raises InputError for a session that is longer than the model's context.
    """
    longest = first + turns * _ADDED[1] * first // _AGENT_FIRST
    if longest > (stated_positions(configuration(shape)) or longest):
        raise InputError(
            f"The last prompt may have {longest:,} tokens, and {shape} takes fewer: choose fewer turns, or a smaller "
            "first prompt."
        )
    memory = session_memory(shape, first, turns)
    with _folder() as folder:
        target = write_shape(shape, folder / shape)
        alone = Pipeline(str(target), draft_engine="none", arena_memory=0).memory().bytes
        # The KV of the live request that counts there is in the budget, and as much waits for the disk.
        room = alone + memory.kv
        watch.begin(turns + 2, "the turns")
        measured = list(_turns(lambda: _pipeline(target, room, first), Session(first, turns), watch.finished))
    # Files that are made for the disk are not scaled.
    files = _FILES * kv_bytes(shape, _BLOCK)
    return session_findings(shape, measured, memory, int(memory.kv * _TOLERANCE) + files)


@contextmanager
def _folder() -> Iterator[Path]:
    """For the model and, within the context, for the disk caches and the lists of shared memory of this process and its
    children: empty, and removed at the end. Where the user's disk cache is, since it takes gigabytes."""
    before = dict(os.environ)
    cache_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="session-", dir=cache_folder()) as folder:
        for variable in (PREFIXES_VARIABLE, SEGMENTS_VARIABLE):
            os.environ[variable] = str(Path(folder) / variable.lower())
        try:
            yield Path(folder)
        finally:
            for variable in (PREFIXES_VARIABLE, SEGMENTS_VARIABLE):
                del os.environ[variable]
            os.environ.update(before)


def _pipeline(target: Path, room: int, first: int) -> Pipeline:
    chunk = max(_SHORT, Options().prefill_step_size * first // _AGENT_FIRST)
    return Pipeline(str(target), draft_engine="none", room=room, disk_cache=8.0, prefill_step_size=chunk)


def _turns(opened: Callable[[], Pipeline], session: Session, on_turn: Callable[[str], None]) -> Iterator[SessionTurn]:
    """`opened` makes pipelines with the same models and memory."""
    # A server knows where its client's instructions end.
    params = SamplingParams(temperature=0.0, **UNFILTERED, max_tokens=_ANSWER, rules=session.rules)
    with ExitStack() as stack:
        pipeline = stack.enter_context(opened())
        before = _own_memory(pipeline)
        for kind, prompt in session.prompts():
            if kind == RESTART:
                stack.close()
                pipeline = stack.enter_context(opened())
                before = _own_memory(pipeline)
            shared = session.shared(prompt)
            with _Watched(pipeline) as watched:
                answer = pipeline.generate(list(prompt), params)
            target, orchestrator = (max(0, now - then) for now, then in zip(_own_memory(pipeline), before, strict=True))
            yield SessionTurn(
                kind=kind,
                prompt=len(prompt),
                shared=shared,
                cached=answer.statistics.adopted_tokens,
                first_token=answer.statistics.time_to_first_token,
                saving=answer.statistics.saving_seconds / answer.statistics.rounds,
                target=target,
                most=max(target, watched.most - before[0]),
                orchestrator=orchestrator,
                shared_memory=_size(_segments()),
            )
            on_turn(kind)
            session.answered(kind, prompt, answer.tokens)


_MIB = 1 / (1 << 20)
_FIELDS: tuple[Field[SessionTurn], ...] = (
    Field("turn", lambda turn: turn.kind),
    Field("prompt", lambda turn: turn.prompt, ",d", "its tokens"),
    Field("shared", lambda turn: turn.shared, ",d", "its first tokens that the session had before"),
    Field("cached", lambda turn: turn.cached, ",d", "tokens that were not evaluated"),
    Field("read again", lambda turn: turn.read_again, ",d", "shared tokens that were evaluated"),
    Field("first token, s", lambda turn: turn.first_token, ",.2f"),
    Field("saving, ms", lambda turn: turn.saving, ",.1f", "of KV, in a round of the answer", scale=1e3),
    Field("target, MiB", lambda turn: turn.target, ",.0f", "its process alone, since the start", scale=_MIB),
    Field("at most, MiB", lambda turn: turn.most, ",.0f", "during the turn", scale=_MIB),
    Field("orchestrator, MiB", lambda turn: turn.orchestrator, ",.0f", "the same", scale=_MIB),
    Field("shared memory, MiB", lambda turn: turn.shared_memory, ",.0f", scale=_MIB),
)


def session_findings(shape: str, turns: Sequence[SessionTurn], memory: SessionMemory, most: int) -> Findings:
    """A row a turn; a check warns where tokens were read again, or KV and its copy took more than `most` bytes."""
    again = [
        Check(f"{turn.kind}, {turn.prompt:,} tokens", "warn", f"{turn.read_again:,} tokens were read again")
        for turn in turns
        if turn.read_again > _SHORT
    ]
    taken = max((turn.target + turn.shared_memory for turn in turns), default=0)
    if taken > most:
        again.append(Check("memory", "warn", f"KV and its copy took {taken * _MIB:,.0f} of {most * _MIB:,.0f} MiB"))
    return Findings(
        title=f"a session of an agent, {shape}",
        conditions=(
            f"{memory.kv * _MIB:,.0f} MiB for the target's KV, about {memory.tokens:,} tokens, as on a Mac with "
            f"{memory.gb} GB.",
            *machine_lines(),
        ),
        tables=(tabulated("", _FIELDS, turns),),
        checks=tuple(again),
        figures={
            "machine": machine_lines(),
            "shape": shape,
            "budget": memory.kv,
            "mac": memory.gb,
            "turns": list(turns),
        },
    )


class _Watched:
    """Looks at the target's memory while a turn runs."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.most = 0
        """Bytes of its process."""
        self._pipeline = pipeline
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_SECONDS):
            self.most = max(self.most, _own_memory(self._pipeline)[0])


def _own_memory(pipeline: Pipeline) -> tuple[int, int]:
    """Bytes that the target's and the orchestrator's processes have in memory, without those of files and of shared
    memory where the system tells them apart. Only the command lines of a pipeline's processes contain its session
    folder."""
    session = str(Path(pipeline.address.removeprefix("ipc://")).parent)
    listing = subprocess.run(
        ["ps", "-A", "-ww", "-o", "pid=,rss=,command="], capture_output=True, text=True, check=True
    )
    lines = [line for line in listing.stdout.splitlines() if session in line]
    target, orchestrator = (
        sum(_alone(*line.split()[:2]) for line in lines if f"-m {module} " in line)
        for module in ("target_worker", "orchestrator")
    )
    return target, orchestrator


def _alone(pid: str, resident: str) -> int:
    """Bytes, from KiB; all of them where the system does not say which are the process's own. Pages of files go and
    come back as the system pleases."""
    with suppress(OSError):
        for line in (Path("/proc") / pid / "status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) << 10
    return int(resident) << 10


def _segments() -> set[Path]:
    """Shared memory of this session's pipelines; none where the system does not show it as files."""
    return {SHARED_MEMORY / entry.name for entry in segments_folder().glob("lp-*")}


def _size(segments: set[Path]) -> int:
    """Bytes that they take."""
    return sum(512 * segment.stat().st_blocks for segment in segments if segment.is_file())
