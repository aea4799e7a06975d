"""What a bench compares: the settings, the words of the command line that name them, and the models."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from orchestrator.api.settings import PipelineSettings
from orchestrator.core.options import StrategyName
from orchestrator.core.policy.strategies import STRATEGIES
from orchestrator.lab.bench.contender import GenerationTask
from orchestrator.machine.checkpoints import resolve
from orchestrator.machine.drafts.converted_draft import converted_draft, loaded_bytes
from orchestrator.machine.drafts.draft_choice import pair_for
from protocol.contracts.coreml import OnProgress, silent
from protocol.contracts.drafters.detection import read_drafter
from protocol.contracts.engines import AUTO, DraftEngineName, draft_model
from protocol.contracts.model_folder import ModelFolder
from protocol.errors import InputError

CHAINS = ("sd", "ssd")
"""Strategies that verify chains of K tokens."""
DEFAULT_DRAFT_TOKENS = "1-4,6,8"
_MOST_DRAFT_TOKENS = 64
_TEMPERATURES = (0.0, 1.0)


class BenchModels(NamedTuple):
    target: Path
    draft: Path
    note: str = ""
    """One line for the user if a model is not the one to be expected."""
    engine: DraftEngineName = "mlx"
    """The draft's: mlx of a language model, another one of a trained drafter."""

    @property
    def trained(self) -> bool:
        """The draft is a trained drafter, which mlx-lm has no form for."""
        return self.engine != "mlx"

    def settings(self, strategy: str, engine: DraftEngineName | None = None) -> PipelineSettings:
        """Of a pipeline for a strategy's name; `engine` runs the draft, by default its own."""
        target, draft = str(self.target), str(self.draft)
        return PipelineSettings(target=target, draft=draft, draft_engine=engine or self.engine, strategy=strategy)

    def draft_bytes(self, strategy: str, engine: DraftEngineName | None = None) -> int:
        """Memory of the draft model that such a pipeline loads. A package is converted now if need be."""
        model = draft_model(engine or self.engine)
        if model == "none" or not STRATEGIES[strategy].drafts:
            return 0
        return loaded_bytes(converted_draft(str(self.draft))) if model == "package" else ModelFolder(self.draft).size


def bench_models(target: str | None, draft: str | None, on_progress: OnProgress = silent) -> BenchModels:
    """The models of these names (None: the default pair), fetched or converted on first use.

    Raises InputError for a model that can't be had, and for a target of another family than the shipped drafts if no
    draft is named.
    """
    trained = draft is not None and read_drafter(resolve(draft, "draft", on_progress)) is not None
    pair = pair_for(target, AUTO if trained else "mlx", draft, on_progress)
    if pair.draft.folder is None:
        raise InputError(pair.draft.note)
    return BenchModels(
        pair.target, pair.draft.folder, " ".join(filter(None, (pair.note, pair.draft.note))), pair.draft.engine
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """The settings of a bench."""

    target: str | None
    draft: str | None
    strategies: tuple[StrategyName, ...]
    draft_tokens: tuple[int, ...]
    """Every K of mlx-lm's speculation, of sd and of ssd. None at all: no speculation of mlx-lm, and the default K."""
    temperatures: tuple[float, ...]
    repeats: int
    max_tokens: int
    core_ml_draft: bool = False
    """Also a pipeline whose draft runs in Core ML, converted on its first use."""
    pace: str | None = None
    """Name or path of the device profile that all contenders are paced by."""
    replay: bool = False
    """Record the target's texts once, and replay them in place of the target's model."""
    rivals: str | None = None
    """Other software that takes part: LLAMA_CPP, or none."""

    @classmethod
    def of(
        cls,
        *,
        draft_tokens: str,
        strategies: str,
        temperature: Sequence[float],
        **others: Any,
    ) -> "BenchPlan":
        """From the options of the command line. Raises InputError naming the wrong one."""
        temperatures = tuple(dict.fromkeys(temperature)) or _TEMPERATURES
        for each in temperatures:
            GenerationTask((0,), 1, each, 0).sampling().submit("", "check")
        return cls(
            draft_tokens=parse_draft_tokens(draft_tokens),
            strategies=parse_strategies(strategies),
            temperatures=temperatures,
            **others,
        )

    def models(self, on_progress: OnProgress = silent) -> BenchModels:
        """Target and draft; they may be fetched or converted. Raises InputError for what can't be had."""
        return bench_models(self.target, self.draft, on_progress)

    @property
    def replays(self) -> bool:
        """Whether recorded texts stand in for the target: only the pace of a device gives them a time."""
        return self.replay and self.pace is not None


def parse_strategies(text: str) -> tuple[StrategyName, ...]:
    """Strategies separated by commas. Raises InputError naming the unknown ones."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in STRATEGIES]
    if unknown or not names:
        raise InputError(f"There is no strategy {', '.join(unknown) or text!r}: choose from {', '.join(STRATEGIES)}.")
    return tuple(dict.fromkeys(names))


def parse_draft_tokens(text: str) -> tuple[int, ...]:
    """A number, a range or several of them: "2", "1-8", "1,2,4"; "0" is none. Raises InputError for anything else."""
    counts: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        low, high = first.strip(), (last or first).strip()
        if not (low.isdecimal() and high.isdecimal() and int(low) <= int(high) <= _MOST_DRAFT_TOKENS):
            raise InputError(
                f"{text!r} names no draft tokens: give numbers up to {_MOST_DRAFT_TOKENS}, like 1-8 or 1,2,4."
            )
        counts.update(range(int(low), int(high) + 1))
    return tuple(sorted(counts - {0}))
