"""Measurements of a bench with given speeds, for tests of its figures, tables and pictures."""

from orchestrator.lab.bench.contender import Family, TimedGeneration
from orchestrator.lab.bench.measurement import Measurement, Setting


def measurement(
    contender: str,
    speed: float,
    prompt: int = 0,
    *,
    repeat: int = 0,
    temperature: float = 0.0,
    category: str = "",
    tokens: tuple[int, ...] = (1, 2),
    **figures,
) -> Measurement:
    """One generation at `speed` tokens/s."""
    family: Family = "mlx-lm" if contender.startswith("mlx-lm") else "coupled"
    generation = TimedGeneration(tokens=tokens, tokens_per_second=speed, tokens_per_round=1.0, **figures)
    return Measurement(Setting(repeat, prompt, temperature, category), contender, family, generation)
