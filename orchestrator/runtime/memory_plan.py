"""The memory of a pipeline on this machine, planned from its setup: what it needs, and the context and the caches with
which it fits, or why it is not started. Loads nothing."""

from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from orchestrator.core.options import FIXED_ARENAS, Options
from orchestrator.core.policy.strategies import STRATEGIES
from orchestrator.machine.checkpoints import gguf_file, known_folder
from orchestrator.machine.drafts.converted_draft import cache_bytes, loaded_bytes
from orchestrator.machine.hardware import (
    computes_on_processor,
    gpu_working_set,
    memory_bytes,
    narrow_memory,
    usable_bytes,
)
from orchestrator.machine.memory.budget import (
    DRAFT,
    LEAST_USEFUL,
    PREFILL,
    TARGET,
    UNASKED_CONTEXT,
    Budget,
    MemorySettings,
    ModelNeed,
    PackageNeed,
    PipelineNeeds,
    refusal,
    size,
    usable,
)
from orchestrator.machine.memory.kv_form import KvSizes, attention_heads, keeps_latents, kv_form
from orchestrator.machine.memory.kv_plan import KvPlan, kv_plan, planned_bytes
from orchestrator.machine.pairs.recommended_pairs import published
from orchestrator.runtime.setup import OrchestratorSetup, core_ml_package, machines, model_folders, trained_drafter
from protocol.contracts.drafters.detection import read_drafter
from protocol.contracts.engines import NO_DRAFT
from protocol.contracts.model_folder import PROCESSOR_BYTES, SHARED, ModelFolder, stated_shape
from protocol.errors import InputError
from protocol.kv.segments import free_shared_memory
from protocol.messages.base import MAX_CONTEXT, Role

_NAMES: dict[Role, str] = {"target": TARGET, "draft": DRAFT, "prefill": PREFILL}
_PARAMETER_BYTES = 2
"""Of an MTP head in its target's own checkpoint, in fp16 or bf16."""
_CACHES = ("arena_memory", "prefix_cache_memory")
"""The options that bound caches for KV."""
_FITTED = ("context", *_CACHES)
"""The options that are changed so that a pipeline fits."""
_CERTAIN_SHARE = 0.5
"""Of the memory: so much may be used on every machine, and macOS need not be asked what it recommends."""
_LEAST_CACHE = 16
"""MiB to which arenas and prefix caches are lowered at most."""


class PipelineMemory(NamedTuple):
    """What a pipeline takes of this machine's memory."""

    bytes: int
    """Counted for its processes."""
    weights: int
    """Of these, the models' own."""
    kv_for: str
    """The requests whose KV counts, for users."""
    options: dict[str, Any]
    """Those that are as they are so that it fits."""


def fitted(setup: OrchestratorSetup, room: int | None = None) -> tuple[OrchestratorSetup, str]:
    """The setup with a context and caches that fit, and a note where something was lowered.

    `room`: bytes that the pipeline may take, its caches included, if other pipelines have the rest of the memory.
    Raises InputError, with the arithmetic and the settings that would fit, for what does not fit into the machine.
    """
    options, shared = setup.options, _shareable()
    if shared is not None and options.arena_memory != "auto":
        options = msgspec.structs.replace(options, arena_memory=min(options.arena_memory, shared >> 20))
        setup = msgspec.structs.replace(setup, options=options)
    try:
        needs = pipeline_needs(setup)
    except InputError:
        # The worker that loads the model says what is wrong with it.
        return setup, ""
    memory = memory_bytes()
    planned = {name: "auto" for name in _CACHES if getattr(options, name) == "auto"}
    # Of what is planned, the least has to fit.
    options = msgspec.structs.replace(options, **dict.fromkeys(planned, _LEAST_CACHE))
    settings = memory_settings(options, needs)
    # Where all fits into what every machine has for it, macOS need not be asked what it recommends.
    small = options.context != "auto" and needs.budget(settings).total_bytes <= _CERTAIN_SHARE * memory
    available = usable(memory) if small else usable(memory, gpu_working_set())
    within = available if room is None else min(available, room)
    least = needs.budget(memory_settings(_with_caches(options, 0.0), needs)).cache_bytes
    notes: list[str] = []
    if options.context == "auto":
        context = needs.largest_context(settings, within - least) or min(LEAST_USEFUL, needs.context)
        settings = msgspec.structs.replace(settings, context=context)
        options = msgspec.structs.replace(options, context=context)
        if context < needs.context:
            notes.append(f"A request may have {context:,} of the target's {needs.context:,} tokens: more don't fit.")
    reason = None if options.memory_check == "off" else refusal(needs, settings, available, memory)
    if reason is not None:
        raise InputError(reason)
    budget = needs.budget(settings)
    if least < budget.cache_bytes > within - budget.required_bytes:
        share = (within - budget.required_bytes - least) / (budget.cache_bytes - least)
        options = _with_caches(options, max(0.0, share))
        lowered = needs.budget(memory_settings(options, needs)).cache_bytes
        notes.append(f"The caches for KV are lowered to {size(lowered)}, which is what the models leave.")
    setup = msgspec.structs.replace(setup, options=msgspec.structs.replace(options, **planned))
    if planned:
        setup = _planned(setup, needs, settings, memory if room is None else room, shared)
    return setup, " ".join(notes)


def _planned(
    setup: OrchestratorSetup, needs: PipelineNeeds, settings: MemorySettings, most: int, shared: int | None
) -> OrchestratorSetup:
    """The setup with a plan's numbers in place of `auto`; 1 MiB at least, since 0 would keep nothing at all.

    `most`: bytes that the pipeline may take at most; `shared`: as of `kv_plan`.
    """
    options = setup.options
    if needs.unknown(TARGET):
        stated = {"arena_memory": options.arenas, "prefix_cache_memory": options.prefix_cache}
        return msgspec.structs.replace(setup, options=msgspec.structs.replace(options, **stated))
    arenas = None if options.arena_memory == "auto" else options.arena_memory << 20
    if arenas is None and (setup.prefill_engine != "none" or options.prefix_cache_memory == 0):
        # Here arenas are no copies: other processes take KV from them, or it is nowhere else.
        arenas = min(FIXED_ARENAS << 20, FIXED_ARENAS << 20 if shared is None else shared)
    if setup.target_hosts is not None or setup.target_engine != "mlx":
        arenas = 0
    stated = 0 if options.prefix_cache_memory == "auto" else needs.budget(settings).caches["prefix caches"]

    def plan(available: int) -> KvPlan:
        within = min(most, available) - stated
        return kv_plan(needs, settings, within, concurrent=options.concurrent, arenas=arenas, shared=shared)

    # What fits into the memory that every machine has for it need not be computed from what macOS recommends.
    memory = memory_bytes()
    found = plan(int(_CERTAIN_SHARE * memory))
    if not found.whole:
        found = plan(usable(memory, gpu_working_set()))
    if options.arena_memory == "auto":
        options = msgspec.structs.replace(options, arena_memory=max(1, found.arenas >> 20))
    if options.prefix_cache_memory != "auto" or not options.arena_memory:
        # Each worker has what the user stated.
        options = msgspec.structs.replace(options, prefix_cache_memory=options.prefix_cache)
        return msgspec.structs.replace(setup, options=options)
    options = msgspec.structs.replace(options, prefix_cache_memory=max(1, found.target >> 20))
    return msgspec.structs.replace(setup, options=options, kv=found)


def _shareable() -> int | None:
    """Bytes that arenas may have: half of what the system has for sharing; None: it has no limit of its own."""
    free = free_shared_memory()
    return None if free is None else free // 2


def _with_caches(options: Options, share: float) -> Options:
    """With this share of what was asked for as arenas and prefix caches, beside the least of each."""
    asked = {name: getattr(options, name) for name in _CACHES}
    least = {name: min(size, _LEAST_CACHE) for name, size in asked.items()}
    lowered = {name: least[name] + int((size - least[name]) * share) for name, size in asked.items()}
    return msgspec.structs.replace(options, **lowered)


def require_room(model: str | None) -> None:
    """Raises InputError for a model whose weights alone don't fit into this machine, before a GGUF file is converted or
    one of a recommended pair is downloaded."""
    listed = {each.id: each for pair in published().values() for each in (pair.target, pair.draft)}.get(model or "")
    if listed is not None and known_folder(listed.id) is None:
        # Weights stay packed where there is no memory to expand them.
        held = listed.weights(on_processor=False)
        _require_fit(held, f"{model} has", "`launch-pipeline pairs` lists what fits. --memory-check off downloads it")
    try:
        file = gguf_file(model) if model is not None and known_folder(model) is None else None
        if file is None:
            return
        # It imports the tables of every architecture.
        from orchestrator.machine.gguf.folder import planned

        conversion, on_processor = planned(file)
    except (InputError, OSError):
        # Whoever converts it says what is wrong with it.
        return
    held = on_processor if computes_on_processor() else conversion.bytes
    what = f"{conversion.file} ({size(conversion.file_bytes)}) becomes"
    _require_fit(held, what, "choose a smaller file. --memory-check off converts it")


def _require_fit(weights: float, what: str, remedy: str) -> None:
    available = usable(memory_bytes(), gpu_working_set())
    if weights > available:
        raise InputError(
            f"{what} weights of {size(weights)}, and a pipeline may use {size(available)} of this machine's "
            f"{size(memory_bytes())}: {remedy} all the same."
        )


def memory_of(setup: OrchestratorSetup) -> PipelineMemory:
    """What the pipeline takes. Raises InputError for a model that can't be read."""
    needs = pipeline_needs(setup)
    settings = memory_settings(setup.options, needs)
    options = {name: getattr(setup.options, name) for name in _FITTED}
    plan = setup.kv
    taken = needs.budget(settings).total_bytes if plan is None else planned_bytes(needs, settings, plan)
    weights = sum(each.weights for each in (*needs.models, needs.package) if each is not None)
    return PipelineMemory(taken, weights, settings.kv_for, options)


def kept_alone(target: Path) -> int:
    """Tokens of conversations that a pipeline without a draft keeps here; 0 if that can't be computed."""
    setup = OrchestratorSetup(session="", address="", target=str(target), draft="", draft_engine=NO_DRAFT)
    try:
        needs = pipeline_needs(setup)
    except InputError:
        return 0
    settings, available = memory_settings(setup.options, needs), usable_bytes()
    return kv_plan(needs, settings, available, concurrent=setup.options.concurrent, shared=_shareable()).tokens


# What a pipeline needs ----------------------------------------------------------------------------


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


def pipeline_needs(setup: OrchestratorSetup) -> PipelineNeeds:
    """Raises InputError for a model that can't be read."""
    processor, target = computes_on_processor(), ModelFolder(Path(setup.target))
    models = [_model(role, ModelFolder(folder), processor, setup) for role, folder in model_folders(setup).items()]
    drafter, package = trained_drafter(setup), core_ml_package(setup)
    if drafter is not None:
        models.append(_drafter(drafter, target, processor))
    drafted = STRATEGIES[setup.options.strategy].drafts and setup.draft_engine != NO_DRAFT
    workers = (setup.target_engine != "none") + drafted + (setup.prefill_engine not in ("none", "guest"))
    tokenizer = target.path / "tokenizer.json"
    return PipelineNeeds(
        models=tuple(models),
        context=_context(target),
        on_processor=processor,
        package=None if package is None else PackageNeed(loaded_bytes(package), cache_bytes(package)),
        rings=drafter is not None,
        processes=1 + workers,
        tokenizer=tokenizer.stat().st_size if tokenizer.is_file() else 0,
    )


def _model(role: Role, folder: ModelFolder, processor: bool, setup: OrchestratorSetup) -> ModelNeed:
    form, ranks = kv_form(folder.config), machines(setup) if role == "target" else 1
    return ModelNeed(
        name=_NAMES[role],
        weights=_language_model(folder, processor, ranks),
        # Every rank keeps whole latent keys.
        kv=form if form is None or keeps_latents(folder.config) else form.part(1 / ranks),
        heads=attention_heads(folder.config) // ranks,
        quantizes=role != "draft",
        requests=1 if role == "prefill" else None,
        context=_context(folder) if role == "draft" else MAX_CONTEXT,
        kept=role == "target" and not setup.target_hosts,
    )


def _drafter(folder: Path, target: ModelFolder, processor: bool) -> ModelNeed:
    """A trained drafter has layers of its target's shape."""
    drafter = read_drafter(folder) or read_drafter(folder, with_own_head=True)
    form, shape = kv_form(target.config), stated_shape(target.config)
    part = 0.0 if drafter is None or shape is None else drafter.layers / shape.layers
    return ModelNeed(
        name=DRAFT,
        weights=_held(loaded_drafter(folder, target.path, processor), processor),
        kv=None if form is None else KvSizes(form.full + form.windowed).part(part),
        heads=attention_heads(target.config),
    )


def loaded_drafter(folder: Path, target: Path, on_processor: bool) -> int:
    """Bytes of the weights that a trained drafter's process holds: its own, and what it takes of the target's: the
    embedding and the head.

    Raises InputError for a folder that can't be read.
    """
    drafter, taken = read_drafter(folder), ModelFolder(target).tensor_bytes(on_processor)
    if drafter is not None:
        own = ModelFolder(folder, "*.safetensors").loaded_bytes(on_processor)
    else:
        head = read_drafter(folder, with_own_head=True)
        own = 0 if head is None else head.parameters * (PROCESSOR_BYTES if on_processor else _PARAMETER_BYTES)
    return own + sum(size for name, size in taken.items() if SHARED.search(name))


def _language_model(folder: ModelFolder, processor: bool, ranks: int) -> int:
    unpacked = folder.loaded_bytes(processor, ranks)
    held = folder.loaded_bytes(processor, ranks, usable(memory_bytes()))
    return held if held < unpacked else _held(unpacked, processor)


def _held(weights: int, processor: bool) -> int:
    """Bytes with the copies in 16 bits that a processor's products read, where there are any."""
    return weights + weights // 2 if processor and weights // 2 <= narrow_memory() else weights


def _context(folder: ModelFolder) -> int:
    return min(folder.positions or MAX_CONTEXT, MAX_CONTEXT)
