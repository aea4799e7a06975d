"""What a first light was asked to do, and the stages in their order: those that others rely on first. Runs nothing."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import msgspec

from orchestrator.lab.findings import Findings
from orchestrator.machine import hardware as machine_facts

if TYPE_CHECKING:
    from orchestrator.lab.first_light.report import StageReport

Need: TypeAlias = Literal["GPU", "Neural Engine", "second pair"]
"""What a stage can't do without."""


class LightSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options that change what a stage finds."""

    short: bool = False
    """The demo pair and few tokens: whether everything runs, not how fast."""
    second_pair: str = "qwen2.5-3b"
    """A recommended pair that is compared beside the default one."""


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
    Stage("exactness", "pipelines.exactness", "Tokens of each strategy against plain decoding", 5, 15, (), 0.5),
    Stage("widths", "widths.measure", "Logits and time of a forward by width and context", 4, 15),
    Stage("idle", "idle.measure", "Idle time between rounds, beside mlx-lm's own loop", 1, 10),
    Stage("hand-off", "devices.hand_off", "Handing KV over", 1, 5),
    Stage("neural-engine", "neural_engine.measure", "The draft on the Neural Engine", 8, 30, ("Neural Engine",), 3.0),
    Stage("overlap", "devices.overlap", "Draft and target at the same time", 2, 15),
    Stage("placement", "pipelines.placement", "Where the draft computes: in turns, beside, Neural Engine", 3, 25),
    Stage("profile", "devices.profile", "Costs of target and draft, and this machine's profile", 4, 15),
    Stage("prefill", "pipelines.prefill", "Reading a prompt: target, MLX and Core ML", 4, 25, (), 0.5),
    Stage("bench", "pipelines.bench", "Against mlx-lm: the default pair", 6, 20, (), 0.5),
    Stage("second-bench", "pipelines.larger_bench", "Against mlx-lm: a larger pair", 10, 25, ("GPU", "second pair")),
    Stage(
        "second-widths", "widths.measure_larger", "The same by width: a larger target", 1.5, 15, ("GPU", "second pair")
    ),
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
