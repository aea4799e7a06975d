"""What a first light asks, and the stages that find it out, those that others rely on first. Runs nothing."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import msgspec

from orchestrator.lab.findings import Findings
from orchestrator.machine import hardware as machine_facts

if TYPE_CHECKING:
    from orchestrator.lab.first_light.report import StageReport

Need: TypeAlias = Literal["GPU", "Neural Engine", "coremltools", "second pair", "you"]
"""What a stage can't do without; you: it runs only if it is named."""


SECOND_PAIR = "qwen2.5-3b"
"""A recommended pair that is compared beside the default one."""


class LightSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options that change what a stage finds."""

    short: bool = False
    """The demo pair and few tokens: whether everything runs, not how fast."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One measurement, which runs in a process of its own."""

    name: str
    measure: str
    """Module and function of this package: from Asked to Findings."""
    title: str
    minutes: float
    """Estimated; without a Mac it is a guess. A stage that needs more than is left is skipped."""
    limit: float
    """Minutes after which it is ended: far more than it should take."""
    needs: tuple[Need, ...] = ()
    short_minutes: float = 0.2

    def estimate(self, settings: LightSettings) -> float:
        """Minutes."""
        return self.short_minutes if settings.short else self.minutes


STAGES = (
    Stage("machine", "devices.checks", "What this machine has", 0.2, 5),
    Stage("levels", "widths.levels", "Forwards in three types, and of a mixture of experts", 3, 15),
    Stage("widths", "widths.measure", "Logits and time of a forward by width and context", 3, 15),
    Stage("idle", "idle.measure", "Idle time between rounds, beside mlx-lm's own loop", 1, 10),
    Stage("hops", "hops.measure", "A message to another process and back", 0.3, 5),
    Stage("start", "circumstances.start", "From a command to its first token, beside mlx-lm", 0.5, 10),
    Stage("drafters", "widths.drafters", "A trained drafter's steps in MLX", 0.5, 10),
    Stage("neural-engine", "neural_engine.measure", "The draft on the Neural Engine", 9, 30, ("Neural Engine",), 3.0),
    Stage(
        "conversion", "circumstances.conversion", "Decoding while a draft is converted", 2, 15, ("coremltools",), 0.5
    ),
    Stage("overlap", "devices.overlap", "Draft and target at the same time", 2, 15),
    Stage("profile", "devices.profile", "Costs of target and draft, and this machine's profile", 4, 15),
    Stage("prefill", "pipelines.prefill", "Reading a prompt: the target, or a process beside it", 4, 25, (), 0.5),
    Stage("bench", "pipelines.bench", "Against mlx-lm: the default pair", 12, 40, (), 1.0),
    Stage("second-bench", "pipelines.larger_bench", "Against mlx-lm: a larger pair", 11, 30, ("GPU", "second pair")),
    Stage("sleep", "circumstances.sleep", "Decoding before and after sleep", 2, 10, ("you",)),
)


class Question(NamedTuple):
    """The law of the table: a stage answers its questions, or says why it can't."""

    name: str
    stage: str
    asks: str


QUESTIONS = (
    Question("conditions", "machine", "Which power, heat and memory do the figures belong to?"),
    Question("levels", "levels", "Which trees does a target evaluate in each type, and how far are they off?"),
    Question("joint forwards", "levels", "Does a row depend on the texts that share its forward?"),
    Question("ties", "widths", "How often does rounding decide a token, and does it change with the width?"),
    Question("width steps", "widths", "Where do forwards become dearer?"),
    Question("first use", "widths", "What does the first forward of a width cost?"),
    Question("plain rounds", "idle", "How near are plain rounds to mlx-lm's own loop?"),
    Question("rounds with guesses", "idle", "What does the device wait for between two rounds?"),
    Question("staged dispatch", "idle", "What is gained by dispatching early layers while a forward is built?"),
    Question("copies of KV", "idle", "Do rounds that begin before the last token is read copy KV?"),
    Question("hops", "hops", "What does a message take, with and without a class of service, at this power?"),
    Question("start", "start", "How much later than mlx-lm does a pipeline answer?"),
    Question("trained drafters", "drafters", "In which type do they compute, and how fast do they read their weights?"),
    Question("package loads", "neural-engine", "Which widths load there, in what time, and in a new process?"),
    Question("predicts", "neural-engine", "What does a predict take, alone and beside a busy GPU?"),
    Question("cache length", "neural-engine", "What does a predict take with a shorter KV cache?"),
    Question("conversion", "conversion", "How fast is decoding while a draft is converted in the background?"),
    Question("overlap", "overlap", "What is won over taking turns?"),
    Question("contention", "overlap", "How long are the slowest steps of a draft that shares the GPU?"),
    Question("costs", "profile", "What do forwards of both models cost?"),
    Question("prompts", "prefill", "Does a prefill process read a prompt sooner than the target?"),
    Question("exactness", "bench", "Are all tokens the target's own?"),
    Question("speed", "bench", "How fast is each strategy and each place of the draft, beside mlx-lm at its best?"),
    Question("speed, larger pair", "second-bench", "How fast is it with a target of some billions of weights?"),
    Question("sleep", "sleep", "Does a pipeline live on when the machine wakes, and how fast?"),
)


def stage_names() -> list[str]:
    return [stage.name for stage in STAGES]


def has_neural_engine() -> bool:
    """A Mac with Apple silicon and Core ML's Python package. Whether Core ML uses it, only its times tell."""
    return machine_facts.neural_engine() is not None and machine_facts.installed_version("coremltools") is not None


OnNotice: TypeAlias = Callable[[str], None]


class Asked(NamedTuple):
    """The argument of every measurement."""

    settings: LightSettings
    notice: OnNotice
    """Called with what the stage does now."""
    so_far: Callable[[Findings], None] = lambda _: None
    """Called with what is found so far, which is kept if the stage does not come to its end."""

    def sized(self, short: int, full: int) -> int:
        """How many of something is measured."""
        return short if self.settings.short else full


class StageScreen:
    """Shows what goes on. This one shows nothing."""

    def began(self, stage: Stage, seconds_left: float) -> None:
        """A stage begins."""

    def notice(self, words: str) -> None:
        """What the stage does now."""

    def ended(self, report: "StageReport", known: bool) -> None:
        """`known`: the result is of an earlier start."""
