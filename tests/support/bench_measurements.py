"""Measurements of a bench with given speeds, and contenders that compute nothing."""

from orchestrator.lab.bench.contender import Family, GenerationTask, Measurement, Setting, TimedGeneration
from orchestrator.lab.bench.plan import BenchPlan
from protocol.messages.client import Pace, Statistics


def statistics(**figures) -> Statistics:
    """Of a request of one token; `figures` in place of its own."""
    usual = {
        **dict.fromkeys(("prompt_tokens", "generated_tokens", "rounds"), 1),
        **dict.fromkeys(("elapsed", "time_to_first_token", "tokens_per_second", "tokens_per_round"), 1.0),
        **dict.fromkeys(("target_busy", "draft_busy", "overhead_per_round"), 0.0),
        **dict.fromkeys(("hit_rate", "acceptance_rate", "wasted_draft_share")),
        "acceptance_by_depth": (),
    }
    return Statistics(**(usual | figures))


def pace(overruns: int) -> Pace:
    """Of a hundred forwards."""
    return Pace(profile="m4", forwards=100, overruns=overruns, stretch=overruns / 1000, valid=overruns <= 1)


def generation(speed: float = 1.0, tokens: tuple[int, ...] = (1, 2), **figures) -> TimedGeneration:
    return TimedGeneration(tokens=tokens, tokens_per_second=speed, tokens_per_round=1.0, **figures)


def measurement(
    contender: str,
    speed: float,
    prompt: int = 0,
    *,
    repeat: int = 0,
    turn: int = 0,
    temperature: float = 0.0,
    category: str = "",
    tokens: tuple[int, ...] = (1, 2),
    **figures,
) -> Measurement:
    """One generation at `speed` tokens/s."""
    family: Family = "mlx-lm" if contender.startswith("mlx-lm") else "ours"
    setting = Setting(repeat, prompt, temperature, category, turn)
    return Measurement(setting, contender, family, generation(speed, tokens, **figures))


class FakeContender:
    """Returns the same tokens at a fixed speed, and records its tasks; `log` gets its name at every generation."""

    family: Family = "ours"

    def __init__(self, name: str, log: list[str] | None = None) -> None:
        self.name = name
        self.tasks: list[GenerationTask] = []
        self._log = [] if log is None else log

    def generate(self, task: GenerationTask) -> TimedGeneration:
        self.tasks.append(task)
        self._log.append(self.name)
        return generation(10.0)


def bench_plan(**changes) -> BenchPlan:
    """As of the command line."""
    words = {"draft_tokens": "1-2", "strategies": "ar,adaptive", "temperature": ()}
    others = {"target": None, "draft": None, "repeats": 2, "max_tokens": 8}
    return BenchPlan.of(**(words | others | changes))
