"""The memory that a pipeline's processes on this machine need, from its setup. Loads nothing."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from orchestrator.core.options import Options
from orchestrator.core.policy.strategies import STRATEGIES
from orchestrator.machine.drafts.converted_draft import cache_bytes, holds_drafter, loaded_bytes
from orchestrator.machine.hardware import computes_on_processor, gpu_working_set, memory_bytes, narrow_memory
from orchestrator.machine.memory.budget import (
    DRAFT,
    PREFILL,
    TARGET,
    UNASKED_CONTEXT,
    Budget,
    MemorySettings,
    ModelNeed,
    PackageNeed,
    PipelineNeeds,
    usable,
)
from orchestrator.machine.memory.kv_form import KvSizes, attention_heads, keeps_latents, kv_form
from orchestrator.machine.memory.kv_plan import kv_plan
from orchestrator.machine.memory.weights import loaded_drafter, loaded_weights
from orchestrator.runtime.setup import (
    OrchestratorSetup,
    core_ml_packages,
    machines,
    model_folders,
    trained_drafter,
)
from protocol.contracts.drafters.detection import read_drafter
from protocol.contracts.drafters.target_shape import stated_shape
from protocol.contracts.engines import NO_DRAFT
from protocol.contracts.stated_context import stated_positions
from protocol.errors import InputError
from protocol.kv.segments import free_shared_memory
from protocol.messages.base import MAX_CONTEXT, Role

_NAMES: dict[Role, str] = {"target": TARGET, "draft": DRAFT, "prefill": PREFILL}


def needed(setup: OrchestratorSetup) -> Budget:
    """What the pipeline needs as it is set up. Raises InputError for a model that can't be read."""
    needs = pipeline_needs(setup)
    return needs.budget(memory_settings(setup.options, needs))


def memory_settings(options: Options, needs: PipelineNeeds) -> MemorySettings:
    """Where no context is asked for, that which must fit is small: the target's own may be far more than is used."""
    asked = min(options.context_limit, needs.context)
    return MemorySettings(
        context=asked or min(UNASKED_CONTEXT, needs.context),
        requests=1 if options.context == 0 else options.concurrent,
        kv_bits=options.kv_bits,
        arenas=options.arenas << 20,
        prefix_cache=(options.prefix_cache << 20) if options.arenas else 0,
        disk=options.disk_cache > 0,
        chunk=options.prefill_step_size,
    )


def kept_alone(target: Path) -> int:
    """Tokens of conversations that a pipeline without a draft keeps here; 0 if that can't be computed."""
    setup = OrchestratorSetup(session="", address="", target=str(target), draft="", draft_engine=NO_DRAFT)
    try:
        needs = pipeline_needs(setup)
    except InputError:
        return 0
    available, free = usable(memory_bytes(), gpu_working_set()), free_shared_memory()
    settings = memory_settings(setup.options, needs)
    shared = None if free is None else free // 2
    return kv_plan(needs, settings, available, concurrent=setup.options.concurrent, shared=shared).tokens


def pipeline_needs(setup: OrchestratorSetup) -> PipelineNeeds:
    """Raises InputError for a model that can't be read."""
    processor = computes_on_processor()
    models = [_model(role, folder, processor, setup) for role, folder in model_folders(setup).items()]
    drafter = trained_drafter(setup)
    if drafter is not None:
        models.append(_drafter(drafter, Path(setup.target), processor))
    drafted = STRATEGIES[setup.options.strategy].drafts and setup.draft_engine != NO_DRAFT
    workers = (setup.target_engine != "none") + drafted + (setup.prefill_engine not in ("none", "guest"))
    return PipelineNeeds(
        models=tuple(models),
        context=_context(setup),
        on_processor=processor,
        packages=tuple(_packages(setup)),
        rings=_reads_features(setup),
        processes=1 + workers,
        tokenizer=_size(Path(setup.target) / "tokenizer.json"),
    )


def _model(role: Role, folder: Path, processor: bool, setup: OrchestratorSetup) -> ModelNeed:
    config, ranks = _config(folder), machines(setup) if role == "target" else 1
    form = kv_form(config)
    return ModelNeed(
        name=_NAMES[role],
        weights=_held(loaded_weights(folder, processor, ranks), processor),
        # Every rank keeps whole latent keys.
        kv=form if form is None or keeps_latents(config) else form.part(1 / ranks),
        heads=attention_heads(config) // ranks,
        quantizes=role != "draft",
        requests=1 if role == "prefill" else None,
        context=_positions(config) if role == "draft" else MAX_CONTEXT,
        kept=role == "target" and not setup.target_hosts,
    )


def _drafter(folder: Path, target: Path, processor: bool) -> ModelNeed:
    """A trained drafter has layers of its target's shape."""
    drafter, config = read_drafter(folder) or read_drafter(folder, with_own_head=True), _config(target)
    form, shape = kv_form(config), stated_shape(config)
    part = 0.0 if drafter is None or shape is None else drafter.layers / shape.layers
    return ModelNeed(
        name=_NAMES["draft"],
        weights=_held(loaded_drafter(folder, target, processor), processor),
        kv=None if form is None else KvSizes(form.full + form.windowed).part(part),
        heads=attention_heads(config),
    )


def _held(weights: int, processor: bool) -> int:
    """Bytes with the copies in 16 bits that a processor's products read, where there are any."""
    return weights + weights // 2 if processor and weights // 2 <= narrow_memory() else weights


def _packages(setup: OrchestratorSetup) -> Iterator[PackageNeed]:
    for role, folder in core_ml_packages(setup).items():
        yield PackageNeed(_NAMES[role], loaded_bytes(folder), cache_bytes(folder))


def _context(setup: OrchestratorSetup) -> int:
    return _positions(_config(Path(setup.target)))


def _size(file: Path) -> int:
    return file.stat().st_size if file.is_file() else 0


def _positions(config: dict[str, Any]) -> int:
    return min(stated_positions(config) or MAX_CONTEXT, MAX_CONTEXT)


def _reads_features(setup: OrchestratorSetup) -> bool:
    """Whether the draft reads hidden states of the target."""
    drafter, package = trained_drafter(setup), core_ml_packages(setup).get("draft")
    if drafter is not None:
        found = read_drafter(drafter)
        return found is None or found.kind != "exit"
    return package is not None and holds_drafter(package)


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{folder}/config.json can't be read: pass the folder of a complete model.") from error
    if not isinstance(config, dict):
        raise InputError(f"{folder}/config.json is no object: download the model again.")
    return config
