"""Tokens and seconds, summed over rounds. Pure."""

from dataclasses import dataclass


@dataclass(slots=True)
class TokenRate:
    """Begins with no rounds."""

    tokens: float = 0.0
    seconds: float = 0.0
    rounds: int = 0

    def add(self, tokens: float, seconds: float) -> None:
        self.tokens += tokens
        self.seconds += seconds
        self.rounds += 1

    @property
    def per_second(self) -> float:
        return self.tokens / max(1e-9, self.seconds)
