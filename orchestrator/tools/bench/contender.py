"""What is compared: a task that is the same for all, who carries it out, and what came of it. Pure data."""

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from orchestrator.api.sampling_params import SamplingParams
from protocol.messages.client import Pace

Family = Literal["mlx-lm", "ours", "in law"]
"""mlx-lm's own code; ours, token for token the target's; ours, whose tokens are distributed like the target's."""


class GenerationTask(NamedTuple):
    """Continue these tokens."""

    tokens: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int

    def sampling(self) -> SamplingParams:
        """The same for a pipeline."""
        return SamplingParams(temperature=self.temperature, seed=self.seed, max_tokens=self.max_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedGeneration:
    """What one contender made of one task. None: this contender has no such figure."""

    tokens: tuple[int, ...]
    tokens_per_second: float
    """Generated tokens, the first included, divided by the seconds from when the prompt but for its
    last token was evaluated by the target, and that target was free, to the last token."""
    tokens_per_round: float
    """Generated tokens divided by forwards of the target."""
    hit_rate: float | None = None
    acceptance_rate: float | None = None
    """Accepted tokens divided by tokens that the target got to judge."""
    target_busy: float | None = None
    draft_busy: float | None = None
    overhead_per_round: float | None = None
    """Seconds."""
    pace: Pace | None = None
    """Of a paced contender."""


class Contender(Protocol):
    """One way to decode, ready to start at once and idle until then."""

    @property
    def name(self) -> str: ...

    @property
    def family(self) -> Family: ...

    def generate(self, task: GenerationTask) -> TimedGeneration: ...


def takes_part(contender: Contender, temperature: float) -> bool:
    """At temperature 0 both rules of verification accept the same tokens, and one is enough."""
    return contender.family != "in law" or temperature > 0
