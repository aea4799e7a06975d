"""The models of a bench: the pair that `generate` would use, settings of a pipeline with them, and what they read."""

from pathlib import Path
from typing import NamedTuple

from orchestrator.api.settings import PipelineSettings
from orchestrator.core.policy.strategies import STRATEGIES
from orchestrator.lab.bench.names import LOOKUP
from orchestrator.machine.drafts.converted_draft import converted_draft, is_converted, loaded_bytes, source_of
from orchestrator.machine.drafts.draft_choice import pair_for
from orchestrator.machine.models.checkpoints import resolve
from orchestrator.machine.progress import OnProgress, silent
from protocol.contracts.drafters.detection import read_drafter
from protocol.contracts.engines import AUTO, DraftEngineName, draft_model
from protocol.contracts.model_folder import ModelFolder
from protocol.errors import InputError


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
        """Of a pipeline for a strategy's name, or for LOOKUP; `engine` runs the draft, by default its own."""
        if strategy == LOOKUP:
            return PipelineSettings(target=str(self.target), draft_engine="ngram", strategy="adaptive")
        return PipelineSettings(
            target=str(self.target), draft=str(self.draft), draft_engine=engine or self.engine, strategy=strategy
        )

    @property
    def outputs_read(self) -> tuple[int, ...]:
        """The outputs of the target's layers that the draft reads, ascending."""
        drafter = read_drafter(source_of(self.draft) if is_converted(self.draft) else self.draft)
        return drafter.outputs(ModelFolder(self.target).shape) if drafter is not None and drafter.width else ()

    def draft_bytes(self, strategy: str, engine: DraftEngineName | None = None) -> int:
        """Memory of the draft model that such a pipeline loads. A package is converted now if need be."""
        if strategy == LOOKUP or not STRATEGIES[strategy].drafts:
            return 0
        if draft_model(engine or self.engine) == "package":
            return loaded_bytes(converted_draft(str(self.draft)))
        return ModelFolder(self.draft).size


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
