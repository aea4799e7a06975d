"""The stages and their order: the cheapest and those that others rely on first. Runs nothing."""

from dataclasses import dataclass

from orchestrator.lab.first_light.settings import LightSettings, Need


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage. `measurements.NAME.measure(asked)` carries it out in a process of its own."""

    name: str
    title: str
    minutes: float
    """Estimated; without a Mac it is a guess. A stage that needs more than is left is skipped."""
    limit: float
    """Minutes after which it is ended: far more than it should take."""
    needs: tuple[Need, ...] = ()
    short_minutes: float = 0.2

    @property
    def module(self) -> str:
        return self.name.replace("-", "_")

    def estimate(self, settings: LightSettings) -> float:
        """Minutes."""
        return self.short_minutes if settings.short else self.minutes


STAGES = (
    Stage("machine", "What this machine has", 0.2, 5),
    Stage("energy", "Energy a token", 2, 8, ("energy",)),
    Stage("exactness", "Tokens of each strategy against plain decoding", 5, 15),
    Stage("widths", "Logits and time of a forward by width and context", 4, 15),
    Stage("hand-off", "Handing KV over, and the host's other steps", 1, 5),
    Stage("neural-engine", "The draft on the Neural Engine", 8, 30, ("Neural Engine",), 3.0),
    Stage("overlap", "Draft and target at the same time", 2, 15),
    Stage("profile", "Costs of target and draft, and this machine's profile", 4, 15),
    Stage("prefill", "Reading a prompt: target, MLX and Core ML", 4, 25, (), 0.5),
    Stage("drills", "Kill drills", 3, 10, (), 0.5),
    Stage("bench", "Against mlx-lm: the default pair", 6, 20, (), 0.5),
    Stage("second-bench", "Against mlx-lm: a larger pair", 12, 25, ("GPU", "second pair")),
)


def stage_names() -> list[str]:
    return [stage.name for stage in STAGES]


def stage_named(name: str) -> Stage:
    return next(stage for stage in STAGES if stage.name == name)
