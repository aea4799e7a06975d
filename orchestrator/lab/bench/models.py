"""The models of a bench: the pair that `generate` would use, and the keywords of a pipeline with them."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from orchestrator.core.policy.strategies import STRATEGIES
from orchestrator.lab.bench.names import LOOKUP
from orchestrator.lab.bench.weights_read import weights_read
from orchestrator.machine.drafts.converted_draft import converted_draft, is_converted, loaded_bytes, source_of
from orchestrator.machine.drafts.pair_choice import pair_for
from orchestrator.machine.models.checkpoints import weight_bytes
from orchestrator.machine.pairs.recommended_pairs import PROCESSOR_BITS
from orchestrator.machine.progress import OnProgress, silent
from protocol.contracts.drafters.detection import read_drafter
from protocol.contracts.drafters.target_shape import target_shape
from protocol.contracts.engines import DraftEngineName, draft_model
from protocol.errors import InputError


class BenchModels(NamedTuple):
    target: Path
    draft: Path
    note: str = ""
    """One line for the user if a model is not the one to be expected."""

    def pipeline(self, strategy: str, engine: DraftEngineName = "mlx") -> dict[str, Any]:
        """Keywords of `Pipeline` for a strategy's name, or for LOOKUP; `engine` runs the draft model."""
        if strategy == LOOKUP:
            return {"target": str(self.target), "draft_engine": "ngram", "strategy": "adaptive"}
        return {
            "target": str(self.target),
            "draft": str(self.draft),
            "draft_engine": engine,
            "strategy": strategy,
        }

    def draft_scale(self, draft: Path) -> float:
        """What a forward of this draft reads, relative to the pair's own draft: a device profile states the times of
        the latter."""
        return self._read(draft) / self._read(self.draft)

    def parameters_per_guess(self, draft: Path) -> float:
        """Parameters that this draft reads, by tokens that one forward guesses behind one another."""
        drafter = read_drafter(_original(draft))
        return self._read(draft) * 8 / PROCESSOR_BITS / (1 if drafter is None else drafter.block)

    def _read(self, draft: Path) -> float:
        """Bytes that a growth step of this draft reads on a processor."""
        draft = _original(draft)
        drafter = read_drafter(draft)
        if drafter is None:
            return weights_read(draft, on_processor=True)
        read = drafter.read_beside(target_shape(self.target)) * PROCESSOR_BITS / 8
        if drafter.kind == "exit":
            read += weights_read(self.target, on_processor=True, first_layers=drafter.layers)
        return read

    def outputs_read(self, drafts: Iterable[Path]) -> tuple[int, ...]:
        """The outputs of the target's layers that any of these drafts reads, ascending."""
        read = [
            drafter for drafter in map(read_drafter, map(_original, drafts)) if drafter is not None and drafter.width
        ]
        return tuple(sorted({output for drafter in read for output in drafter.outputs(target_shape(self.target))}))

    def draft_bytes(self, strategy: str, engine: DraftEngineName = "mlx", draft: Path | None = None) -> int:
        """Memory of the draft model that such a pipeline loads, the pair's own if none is named. A package is
        converted now if need be."""
        if strategy == LOOKUP or not STRATEGIES[strategy].drafts:
            return 0
        if draft_model(engine) == "package":
            return loaded_bytes(converted_draft(str(draft or self.draft)))
        return weight_bytes(draft or self.draft)


def _original(draft: Path) -> Path:
    """The model or drafter from which a converted draft was made; other folders are their own."""
    return source_of(draft) if is_converted(draft) else draft


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
    if pair.draft.folder is None:
        raise InputError(pair.draft.note)
    return BenchModels(pair.target, pair.draft.folder, " ".join(filter(None, (pair.note, pair.draft.note))))
