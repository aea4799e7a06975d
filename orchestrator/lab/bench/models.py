"""The models of a bench: the pair that `generate` would use, settings of a pipeline with them, and what they read."""

import json
import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from orchestrator.api.settings import PipelineSettings
from orchestrator.core.policy.strategies import STRATEGIES
from orchestrator.lab.bench.names import LOOKUP
from orchestrator.machine.drafts.converted_draft import converted_draft, is_converted, loaded_bytes, source_of
from orchestrator.machine.drafts.draft_choice import measured_pair
from orchestrator.machine.models.checkpoints import weight_bytes
from orchestrator.machine.pairs.recommended_pairs import PROCESSOR_BITS
from orchestrator.machine.progress import OnProgress, silent
from protocol.contracts.drafters.detection import read_drafter
from protocol.contracts.drafters.target_shape import target_shape
from protocol.contracts.engines import DraftEngineName, draft_model
from protocol.contracts.head_tokens import stored_head_tokens
from protocol.errors import InputError

_EMBEDDING, _HEAD = "embed_tokens", "lm_head"
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_SCALES, _BIASES = ".scales", ".biases"


class _Tensor(NamedTuple):
    name: str
    shape: tuple[int, ...]
    stored: int
    """Bytes in the file."""


def weights_read(folder: Path, on_processor: bool, first_layers: int | None = None) -> int:
    """Bytes that one forward of a dense model reads; all experts of a mixture are counted.

    A processor reads float32, a GPU what is stored. Of the embedding a forward reads one row, unless it is also the
    head. `first_layers`: so many layers alone, without embedding and head. Raises OSError or ValueError for a folder
    that holds no such model.
    """
    config = json.loads((folder / "config.json").read_bytes())
    tensors = list(_tensors(folder))
    scales = {tensor.name.removesuffix(_SCALES): tensor for tensor in tensors if tensor.name.endswith(_SCALES)}
    tied = not any(_HEAD in tensor.name for tensor in tensors)
    read = 0.0
    for tensor in tensors:
        if first_layers is not None and _layer(tensor) >= first_layers:
            continue
        size = _unpacked(tensor, scales, config.get("quantization") or {}) if on_processor else tensor.stored
        read += size * _share_of_rows(tensor, tied, folder)
    return round(read)


def _layer(tensor: _Tensor) -> float:
    """Its number; infinity for what belongs to no layer."""
    found = _LAYER.search(tensor.name)
    return math.inf if found is None else int(found[1])


def _tensors(folder: Path) -> Iterator[_Tensor]:
    """The header of a safetensors file: 8 bytes with its length, then JSON."""
    for file in sorted(folder.glob("model*.safetensors")):
        with file.open("rb") as content:
            (length,) = struct.unpack("<Q", content.read(8))
            header: dict[str, Any] = json.loads(content.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                yield _Tensor(name, tuple(entry["shape"]), end - begin)


def _unpacked(tensor: _Tensor, scales: Mapping[str, _Tensor], quantization: Mapping[str, Any]) -> int:
    """Bytes of the weights that the tensor stands for, unpacked; a scale stands for a group of weights."""
    module = tensor.name.removesuffix(".weight")
    if tensor.name.endswith((_SCALES, _BIASES)) and tensor.name.rpartition(".")[0] in scales:
        return 0
    if module not in scales or module == tensor.name:
        return math.prod(tensor.shape) * PROCESSOR_BITS // 8
    own = quantization.get(module)
    group = (own if isinstance(own, dict) else quantization)["group_size"]
    return math.prod(scales[module].shape) * group * PROCESSOR_BITS // 8


def _share_of_rows(tensor: _Tensor, tied: bool, folder: Path) -> float:
    """Of a tensor's rows; an embedding and a head have a row a token of the vocabulary."""
    if _EMBEDDING in tensor.name and not tied:
        return 1 / tensor.shape[0]
    if _EMBEDDING not in tensor.name and _HEAD not in tensor.name:
        return 1.0
    return _head_rows(folder, tensor.shape[0]) / tensor.shape[0]


def _head_rows(folder: Path, vocabulary: int) -> int:
    tokens = stored_head_tokens(folder)
    return vocabulary if tokens is None else len(tokens)


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


def bench_models(target: str | None, draft: str | None, on_progress: OnProgress = silent) -> BenchModels:
    """The models of these names (None: the default pair), fetched or converted on first use.

    Raises InputError for a model that can't be had, and for a target of
    another family than the shipped drafts if no draft is named.
    """
    pair = measured_pair(target, draft, on_progress)
    if pair.draft.folder is None:
        raise InputError(pair.draft.note)
    return BenchModels(pair.target, pair.draft.folder, " ".join(filter(None, (pair.note, pair.draft.note))))
