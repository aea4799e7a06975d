"""`serve` with the models of the configuration file: their memory is checked, then the server runs until Ctrl-C."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator.api.memory_check import PipelineMemory
from orchestrator.api.pipeline import Pipeline
from orchestrator.cli.conversion_bar import ConversionBar
from orchestrator.cli.notices import Notices
from orchestrator.cli.pipelines import print_notes, target_folder
from orchestrator.cli.serving.http_listener import http_listener
from orchestrator.cli.serving.model_table import ConfiguredModel
from orchestrator.core.models.events import ModelEntry, ModelName
from orchestrator.http.settings import ServerSettings
from orchestrator.machine.hardware import gpu_working_set, memory_bytes
from orchestrator.machine.memory.budget import GIB, usable
from orchestrator.machine.models.checkpoints import weight_bytes
from protocol.contracts.coreml.conversion import Progress
from protocol.errors import InputError


def serve_models(
    models: Sequence[ConfiguredModel],
    settings: ServerSettings,
    port: int,
    made: bool,
    *,
    keep_minutes: float,
    memory_gib: float | None,
) -> None:
    """`keep_minutes`: how long a model without requests stays loaded, 0 for ever. `memory_gib`: for all models, None
    for a share of this machine's. Models may be fetched. Raises InputError for one that can't be had."""
    settings = dataclasses.replace(settings, names=tuple(name for model in models for name in model.names))
    # The libraries of the server take a while, which other commands need not wait for.
    from orchestrator.http.models.pipelines import ModelPipeline
    from orchestrator.http.models.run import ModelMemory, run_models

    room = usable(memory_bytes(), gpu_working_set()) if memory_gib is None else int(memory_gib * GIB)
    if settings.embedding is not None:
        room -= (size := weight_bytes(settings.embedding.folder))
        if room <= 0:
            raise InputError(
                f"The embedding model alone takes {size / GIB:.1f} GiB of the {(room + size) / GIB:.1f} GiB for "
                "models: raise --models-memory, or choose a smaller one."
            )
    shared = ModelMemory(room=room, keep=keep_minutes * 60 or None)
    with http_listener(settings, port) as listener:
        notices = Notices(at_once=True)
        served: list[tuple[ModelEntry, ModelPipeline]] = []
        left = room
        # Pinned models are always loaded: others have what these leave.
        for model in sorted(models, key=lambda model: (not model.pinned, model.options.get("context") == "auto")):
            folder, memory = _examined(model, left)
            left -= memory.bytes if model.pinned else 0
            entry = ModelEntry(ModelName(model.name), memory.bytes, model.pinned, memory.kv_for)
            make = partial(_made, {**model.options, **memory.options}, notices)
            served.append((entry, ModelPipeline(model.names, folder, make)))
        served.sort(key=lambda each: settings.names.index(each[0].name))
        _require_pinned_fit([entry for entry, _ in served], room)
        run_models(served, shared, settings, listener, made)


def _examined(model: ConfiguredModel, room: int) -> tuple[Path, PipelineMemory]:
    """Folder of the target, and the memory that the model takes, with a context and caches for KV that leave it within
    `room` if that is possible. Raises InputError, which names the model."""
    try:
        folder = target_folder(model.options["target"], quiet=False)
        with ConversionBar(quiet=False) as bar:
            pipeline = Pipeline(on_progress=bar, room=room, **model.options)
        print_notes([pipeline.note and f"{model.name}: {pipeline.note}"])
        return folder, pipeline.memory()
    except InputError as error:
        raise InputError(f"The model {model.name} can't be served. {error}") from error


def _made(options: Mapping[str, Any], notices: Notices, tell: Callable[[str], None]) -> Pipeline:
    def on_progress(progress: Progress) -> None:
        tell(f"{progress.stage}, {progress.done} of {progress.total}")

    return Pipeline(on_progress=on_progress, on_notice=notices, **options)


def _require_pinned_fit(entries: Sequence[ModelEntry], room: int) -> None:
    pinned = [entry for entry in entries if entry.pinned]
    if sum(entry.bytes for entry in pinned) > room:
        sizes = ", ".join(f"{entry.name} {entry.need}" for entry in pinned)
        raise InputError(
            f"The pinned models need more than the {room / GIB:.1f} GiB for models ({sizes}): pin fewer, or raise "
            "--models-memory."
        )
