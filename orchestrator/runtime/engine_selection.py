"""Which engine the pipeline's own draft runs on: MLX at once, Core ML once it is prepared, then the faster one. Pure.

Facts in, actions out; the runtime starts and ends the processes. Nothing here changes tokens.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from orchestrator.core.commands import TrialDecided
from protocol.contracts.coreml import EngineChoice, EngineRates
from protocol.messages.base import Level

LOADING_SECONDS = 20.0
"""After so long, MLX drafts beside a Core ML draft that still loads."""


@dataclass(frozen=True, slots=True)
class Prepare:
    """Convert the draft and examine it on the Neural Engine, in the background."""


@dataclass(frozen=True, slots=True)
class StartDraft:
    """Start a worker with this engine beside the other one."""

    engine: EngineChoice


@dataclass(frozen=True, slots=True)
class EndDraft:
    """End the worker with this engine, to free its memory."""

    engine: EngineChoice


@dataclass(frozen=True, slots=True)
class RecordTrial:
    """Record the winner of a trial, so that the next start uses it at once."""

    choice: EngineChoice
    reason: str
    rates: EngineRates


@dataclass(frozen=True, slots=True)
class Tell:
    """Tell the user; a warning also counts."""

    text: str
    warning: bool = False


SelectionAction: TypeAlias = Prepare | StartDraft | EndDraft | RecordTrial | Tell
_Phase: TypeAlias = Literal["waiting", "preparing", "loading", "trying", "chosen", "both"]
"""waiting: the models of the pipeline still load; both: one engine is too small for some requests, so both stay."""


class EngineSelection:
    """The pipeline begins with the engine `first`: with MLX, or with Core ML if that was found faster before."""

    def __init__(self, first: EngineChoice, now: float) -> None:
        self.warnings = 0
        """Failures of the Neural Engine that the user was told of."""
        self._phase: _Phase = "waiting" if first == "mlx" else "chosen"
        self._started: set[EngineChoice] = {first}
        """Engines whose worker runs or loads."""
        self._up: dict[EngineChoice, int] = {}
        """Incarnations of the workers that have loaded their model."""
        self._context = 0
        """Of the Core ML draft."""
        self._late_at = now + LOADING_SECONDS if first == "coreml" else None

    def deadline(self) -> float | None:
        """When the next `tick` is due."""
        return self._late_at

    def tick(self, now: float) -> list[SelectionAction]:
        """Time has passed."""
        if self._late_at is None or now < self._late_at:
            return []
        self._late_at = None
        self._phase = "trying"
        return [*self._start("mlx"), Tell("Core ML still loads the draft; MLX drafts meanwhile.")]

    def pipeline_ready(self, level: Level = "tree") -> list[SelectionAction]:
        """All models are loaded, so that the preparation delays none of them. `level`: of the target."""
        if self._phase != "waiting" or level == "plain":
            return []
        self._phase = "preparing"
        return [Prepare()]

    def prepared(self) -> list[SelectionAction]:
        """The draft is converted, and the Neural Engine computes what it should."""
        self._phase = "loading"
        return self._start("coreml")

    def declined(self, reason: str) -> list[SelectionAction]:
        """The draft can't run on the Neural Engine."""
        self._phase = "chosen"
        return [self._warning(f"The draft runs in MLX, not on the Neural Engine: {reason.rstrip('.')}.")]

    def draft_up(self, engine: EngineChoice, incarnation: int, context: int) -> list[SelectionAction]:
        """A worker has loaded its model; it may be a later life of one that died."""
        self._started.add(engine)
        self._up[engine] = incarnation
        if engine == "mlx":
            return []
        self._context, self._late_at = context, None
        if self._phase != "loading":
            return []
        self._phase = "trying"
        return [Tell("The draft runs in MLX and, on trial, on the Neural Engine.")]

    def draft_lost(self, engine: EngineChoice, reason: str) -> list[SelectionAction]:
        """A worker has ended and is not started again."""
        self._started.discard(engine)
        self._up.pop(engine, None)
        if engine == "mlx":
            # There is nothing to compare any more.
            self._phase = "chosen" if self._phase == "trying" else self._phase
            return [] if self._started else [self._warning(f"The target decodes alone: the MLX draft {reason}")]
        self._phase, self._late_at = "chosen", None
        warning = self._warning(f"The draft runs in MLX: on the Neural Engine its worker {reason.rstrip('.')}.")
        return [*self._start("mlx"), warning]

    def trial_decided(self, decided: TrialDecided) -> list[SelectionAction]:
        """Two drafts were compared; they may be others."""
        engines: dict[int, EngineChoice] = {incarnation: engine for engine, incarnation in self._up.items()}
        winner, loser = engines.get(decided.winner), engines.get(decided.loser)
        if self._phase != "trying" or winner is None or loser is None:
            return []
        self._phase = "chosen"
        del self._up[loser]
        self._started.discard(loser)
        rates = EngineRates(
            *(
                (decided.winner_rate, decided.loser_rate)
                if winner == "coreml"
                else (decided.loser_rate, decided.winner_rate)
            )
        )
        reason = f"{rates.coreml:.1f} tokens/s on the Neural Engine and {rates.mlx:.1f} in MLX, by a trial"
        where = "on the Neural Engine" if winner == "coreml" else "in MLX"
        told = Tell(f"The draft runs {where} from now on: {reason}.")
        return [EndDraft(loser), RecordTrial(winner, reason, rates), told]

    def submitted(self, tokens: int) -> list[SelectionAction]:
        """A request with a prompt of so many tokens begins."""
        if "mlx" in self._started or not self._context or tokens < self._context:
            return []
        self._phase = "both"
        text = f"A prompt of {tokens:,} tokens exceeds the Core ML draft's context of {self._context:,}: "
        return [*self._start("mlx"), Tell(text + "MLX drafts beside it again.")]

    def _start(self, engine: EngineChoice) -> list[SelectionAction]:
        if engine in self._started:
            return []
        self._started.add(engine)
        return [StartDraft(engine)]

    def _warning(self, text: str) -> Tell:
        self.warnings += 1
        return Tell(text, warning=True)
