"""The models of a bench: the pair that `generate` would use, and the keywords of a pipeline with them."""

from pathlib import Path
from typing import Any, NamedTuple

from orchestrator.machine.draft_choice import DraftChoice
from orchestrator.machine.pair_choice import pair_for
from orchestrator.machine.progress import OnProgress, silent
from orchestrator.tools.bench.names import LOOKUP
from protocol.contracts.engines import NO_DRAFT, DraftEngineName
from protocol.errors import InputError


class BenchModels(NamedTuple):
    target: Path
    draft: Path | None
    """None: the target has no draft model, and the n-gram engine drafts."""
    note: str = ""
    """One line for the user if a model is not the one to be expected."""

    def pipeline(self, strategy: str, engine: DraftEngineName = "mlx") -> dict[str, Any]:
        """Keywords of `Pipeline` for a strategy's name, or for LOOKUP; `engine` runs the draft model."""
        if strategy == LOOKUP:
            return {"target": str(self.target), "draft_engine": "ngram", "strategy": "adaptive"}
        if self.draft is None:
            return {"target": str(self.target), "draft_engine": "ngram", "strategy": strategy}
        return {
            "target": str(self.target),
            "draft": str(self.draft),
            "draft_engine": engine,
            "strategy": strategy,
        }


def bench_models(
    target: str | None, draft: str | None, same_model: bool, on_progress: OnProgress = silent
) -> BenchModels:
    """The models of these names (None: the default pair), fetched or converted on first use.

    `same_model`: the target is its own draft. Raises InputError for a model that can't be had, and for a target of
    another family than the shipped drafts if no draft is named.
    """
    pair = pair_for(target, "mlx", draft, on_progress)
    if same_model:
        return BenchModels(pair.target, pair.target, pair.note)
    if pair.draft.engine == NO_DRAFT:
        raise InputError(pair.draft.note)
    return BenchModels(pair.target, pair.draft.folder, " ".join(filter(None, (pair.note, _note(pair.draft)))))


def _note(draft: DraftChoice) -> str:
    if draft.folder is not None:
        return draft.note
    return (
        f"{draft.note} mlx-lm's speculative decoding and the random draft need a draft model: they are left out, and "
        "adaptive is prompt lookup alone."
    )
