"""The models of a bench: the pair that `generate` would use, settings of a pipeline with them, and what they read."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from orchestrator.api.settings import PipelineSettings
from orchestrator.core.policy.strategies import STRATEGIES
from orchestrator.lab.bench.names import LOOKUP
from orchestrator.machine.drafts.converted_draft import converted_draft, is_converted, loaded_bytes, source_of
from orchestrator.machine.drafts.draft_choice import measured_pair
from orchestrator.machine.pairs.recommended_pairs import PROCESSOR_BITS
from orchestrator.machine.progress import OnProgress, silent
from protocol.contracts.drafters.detection import read_drafter
from protocol.contracts.engines import DraftEngineName, draft_model
from protocol.contracts.model_folder import ModelFolder, layer_number, stored_head_tokens
from protocol.errors import InputError

_EMBEDDING, _HEAD = "embed_tokens", "lm_head"


def weights_read(folder: Path, on_processor: bool, first_layers: int | None = None) -> int:
    """Bytes that one forward of a dense model reads; all experts of a mixture are counted.

    A processor reads float32, a GPU what is stored. Of the embedding a forward reads one row, unless it is also the
    head. `first_layers`: so many layers alone, without embedding and head. Raises InputError for a folder that can't be
    read.
    """
    model = ModelFolder(folder)
    tied = not any(_HEAD in name for name in model.tensors)
    read = 0.0
    for name, size in model.tensor_bytes(on_processor).items():
        layer = layer_number(name)
        if first_layers is None:
            read += size * _share_of_rows(name, model.tensors[name].shape[0], tied, folder)
        elif layer is not None and layer < first_layers:
            read += size
    return round(read)


def _share_of_rows(name: str, rows: int, tied: bool, folder: Path) -> float:
    """Of a tensor's rows; an embedding and a head have a row a token of the vocabulary."""
    if _EMBEDDING in name and not tied:
        return 1 / rows
    if _EMBEDDING not in name and _HEAD not in name:
        return 1.0
    tokens = stored_head_tokens(folder)
    return 1.0 if tokens is None else len(tokens) / rows


class BenchModels(NamedTuple):
    target: Path
    draft: Path
    note: str = ""
    """One line for the user if a model is not the one to be expected."""

    def settings(self, strategy: str, engine: DraftEngineName = "mlx") -> PipelineSettings:
        """Of a pipeline for a strategy's name, or for LOOKUP; `engine` runs the draft model."""
        if strategy == LOOKUP:
            return PipelineSettings(target=str(self.target), draft_engine="ngram", strategy="adaptive")
        return PipelineSettings(target=str(self.target), draft=str(self.draft), draft_engine=engine, strategy=strategy)

    def draft_scale(self, draft: Path) -> float:
        """What a forward of this draft reads, relative to the pair's own draft: a device profile states the times of
        the latter."""
        return self._read(draft) / self._read(self.draft)

    def _read(self, draft: Path) -> float:
        """Bytes that a growth step of this draft reads on a processor."""
        draft = _original(draft)
        drafter = read_drafter(draft)
        if drafter is None:
            return weights_read(draft, on_processor=True)
        read = drafter.read_beside(ModelFolder(self.target).shape) * PROCESSOR_BITS / 8
        if drafter.kind == "exit":
            read += weights_read(self.target, on_processor=True, first_layers=drafter.layers)
        return read

    def outputs_read(self, drafts: Iterable[Path]) -> tuple[int, ...]:
        """The outputs of the target's layers that any of these drafts reads, ascending."""
        read = [
            drafter for drafter in map(read_drafter, map(_original, drafts)) if drafter is not None and drafter.width
        ]
        return tuple(sorted({output for drafter in read for output in drafter.outputs(ModelFolder(self.target).shape)}))

    def draft_bytes(self, strategy: str, engine: DraftEngineName = "mlx", draft: Path | None = None) -> int:
        """Memory of the draft model that such a pipeline loads, the pair's own if none is named. A package is
        converted now if need be."""
        if strategy == LOOKUP or not STRATEGIES[strategy].drafts:
            return 0
        if draft_model(engine) == "package":
            return loaded_bytes(converted_draft(str(draft or self.draft)))
        return ModelFolder(draft or self.draft).size


def _original(draft: Path) -> Path:
    """The model or drafter from which a converted draft was made; other folders are their own."""
    return source_of(draft) if is_converted(draft) else draft


def bench_models(target: str | None, draft: str | None, on_progress: OnProgress = silent) -> BenchModels:
    """The models of these names (None: the default pair), fetched or converted on first use.

    Raises InputError for a model that can't be had, and for a target of
    another family than the shipped drafts if no draft is named.
    """
    pair = measured_pair(target, draft, on_progress)
    if pair.draft.folder is None:
        raise InputError(pair.draft.note)
    return BenchModels(pair.target, pair.draft.folder, " ".join(filter(None, (pair.note, pair.draft.note))))
