"""Which engine the pipeline's own draft runs on: MLX at once, Core ML once it is prepared, then the faster one. Pure.

Facts in, calls of `EngineActions` out; the runtime starts and ends the processes. Nothing here changes tokens.
"""

from typing import Literal, Protocol, TypeAlias

from orchestrator.core.commands import TrialDecided
from protocol.contracts.coreml import EngineChoice, EngineRates
from protocol.messages.base import Level

LOADING_SECONDS = 20.0
"""After so long, MLX drafts beside a Core ML draft that still loads."""


class EngineActions(Protocol):
    """What the runtime does about it."""

    def prepare(self) -> None:
        """Convert the draft and examine it on the Neural Engine, in the background."""

    def start_draft(self, engine: EngineChoice) -> None:
        """Start a worker with this engine beside the other one."""

    def end_draft(self, engine: EngineChoice) -> None:
        """End the worker with this engine, to free its memory."""

    def record_trial(self, choice: EngineChoice, reason: str, rates: EngineRates) -> None:
        """Record the winner of a trial, so that the next start uses it at once."""

    def tell(self, text: str, warning: bool = False) -> None:
        """Tell the user."""


_Phase: TypeAlias = Literal["waiting", "preparing", "loading", "trying", "chosen", "both"]
"""waiting: the models of the pipeline still load; both: one engine is too small for some requests, so both stay."""


class EngineSelection:
    """The pipeline begins with the engine `first`: with MLX, or with Core ML if that was found faster before."""

    def __init__(self, first: EngineChoice, now: float, actions: EngineActions) -> None:
        self._actions = actions
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

    def tick(self, now: float) -> None:
        """Time has passed."""
        if self._late_at is None or now < self._late_at:
            return
        self._late_at = None
        self._phase = "trying"
        self._start("mlx")
        self._actions.tell("Core ML still loads the draft; MLX drafts meanwhile.")

    def pipeline_ready(self, level: Level = "tree") -> None:
        """All models are loaded, so that the preparation delays none of them. `level`: of the target."""
        if self._phase == "waiting" and level != "plain":
            self._phase = "preparing"
            self._actions.prepare()

    def prepared(self) -> None:
        """The draft is converted, and the Neural Engine computes what it should."""
        self._phase = "loading"
        self._start("coreml")

    def declined(self, reason: str) -> None:
        """The draft can't run on the Neural Engine."""
        self._phase = "chosen"
        self._actions.tell(f"The draft runs in MLX, not on the Neural Engine: {reason.rstrip('.')}.", warning=True)

    def draft_up(self, engine: EngineChoice, incarnation: int, context: int) -> None:
        """A worker has loaded its model; it may be a later life of one that died."""
        self._started.add(engine)
        self._up[engine] = incarnation
        if engine == "mlx":
            return
        self._context, self._late_at = context, None
        if self._phase == "loading":
            self._phase = "trying"
            self._actions.tell("The draft runs in MLX and, on trial, on the Neural Engine.")

    def draft_lost(self, engine: EngineChoice, reason: str) -> None:
        """A worker has ended and is not started again."""
        self._started.discard(engine)
        self._up.pop(engine, None)
        if engine == "mlx":
            # There is nothing to compare any more.
            self._phase = "chosen" if self._phase == "trying" else self._phase
            if not self._started:
                self._actions.tell(f"The target decodes alone: the MLX draft {reason}", warning=True)
            return
        self._phase, self._late_at = "chosen", None
        self._start("mlx")
        text = f"The draft runs in MLX: on the Neural Engine its worker {reason.rstrip('.')}."
        self._actions.tell(text, warning=True)

    def trial_decided(self, decided: TrialDecided) -> None:
        """Two drafts were compared; they may be others."""
        engines: dict[int, EngineChoice] = {incarnation: engine for engine, incarnation in self._up.items()}
        winner, loser = engines.get(decided.winner), engines.get(decided.loser)
        if self._phase != "trying" or winner is None or loser is None:
            return
        self._phase = "chosen"
        del self._up[loser]
        self._started.discard(loser)
        rate = {winner: decided.winner_rate, loser: decided.loser_rate}
        rates = EngineRates(coreml=rate["coreml"], mlx=rate["mlx"])
        reason = f"{rates.coreml:.1f} tokens/s on the Neural Engine and {rates.mlx:.1f} in MLX, by a trial"
        where = "on the Neural Engine" if winner == "coreml" else "in MLX"
        self._actions.end_draft(loser)
        self._actions.record_trial(winner, reason, rates)
        self._actions.tell(f"The draft runs {where} from now on: {reason}.")

    def submitted(self, tokens: int) -> None:
        """A request with a prompt of so many tokens begins."""
        if "mlx" in self._started or not self._context or tokens < self._context:
            return
        self._phase = "both"
        text = f"A prompt of {tokens:,} tokens exceeds the Core ML draft's context of {self._context:,}: "
        self._start("mlx")
        self._actions.tell(text + "MLX drafts beside it again.")

    def _start(self, engine: EngineChoice) -> None:
        if engine not in self._started:
            self._started.add(engine)
            self._actions.start_draft(engine)
