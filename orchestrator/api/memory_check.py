"""What a pipeline is started with so that it fits into this machine's memory, or why it is not started."""

from typing import Any, NamedTuple

import msgspec

from orchestrator.core.options import FIXED_ARENAS, Options
from orchestrator.machine.hardware import gpu_working_set, memory_bytes
from orchestrator.machine.memory.budget import (
    LEAST_USEFUL,
    TARGET,
    Budget,
    MemorySettings,
    PipelineNeeds,
    refusal,
    size,
    usable,
)
from orchestrator.machine.memory.kv_plan import KvPlan, kv_plan, planned_bytes
from orchestrator.runtime.memory_needed import memory_settings, pipeline_needs
from orchestrator.runtime.setup import OrchestratorSetup
from protocol.errors import InputError
from protocol.kv.segments import free_shared_memory

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


def memory_of(setup: OrchestratorSetup) -> PipelineMemory:
    """What the pipeline takes. Raises InputError for a model that can't be read."""
    needs = pipeline_needs(setup)
    settings = memory_settings(setup.options, needs)
    options = {name: getattr(setup.options, name) for name in _FITTED}
    plan = setup.kv
    taken = needs.budget(settings).total_bytes if plan is None else planned_bytes(needs, settings, plan)
    weights = sum(model.weights for model in (*needs.models, *needs.packages))
    return PipelineMemory(taken, weights, settings.kv_for, options)


def _planned(
    setup: OrchestratorSetup, needs: PipelineNeeds, settings: MemorySettings, memory: int, room: int | None
) -> OrchestratorSetup:
    """The setup with a plan's numbers in place of `auto`; 1 MiB at least, since 0 would keep nothing at all."""
    options = setup.options
    if needs.unknown(TARGET):
        stated = {"arena_memory": options.arenas, "prefix_cache_memory": options.prefix_cache}
        return msgspec.structs.replace(setup, options=msgspec.structs.replace(options, **stated))
    free = free_shared_memory()
    shared = None if free is None else free // 2
    arenas = None if options.arena_memory == "auto" else options.arena_memory << 20
    handed_over = setup.prefill_engine != "none" or setup.draft_engine == "layerskip"
    if arenas is None and (handed_over or options.prefix_cache_memory == 0):
        # Here arenas are no copies: other processes take KV from them, or it is nowhere else.
        arenas = min(FIXED_ARENAS << 20, FIXED_ARENAS << 20 if shared is None else shared)
    if setup.target_hosts is not None or setup.target_engine != "mlx":
        arenas = 0
    stated = 0 if options.prefix_cache_memory == "auto" else needs.budget(settings).caches["prefix caches"]

    def plan(available: int) -> KvPlan:
        return kv_plan(
            needs,
            settings,
            available - stated,
            concurrent=options.concurrent,
            arenas=arenas,
            shared=shared,
        )

    # What fits into the memory that every machine has for it need not be computed from what macOS recommends.
    most = memory if room is None else room
    found = plan(min(most, int(_CERTAIN_SHARE * memory)))
    if not found.whole:
        found = plan(min(most, usable(memory, gpu_working_set())))
    if options.arena_memory == "auto":
        options = msgspec.structs.replace(options, arena_memory=max(1, found.arenas >> 20))
    if options.prefix_cache_memory != "auto" or not options.arena_memory:
        # Each worker has what the user stated.
        return msgspec.structs.replace(
            setup, options=msgspec.structs.replace(options, prefix_cache_memory=options.prefix_cache)
        )
    options = msgspec.structs.replace(options, prefix_cache_memory=max(1, found.target >> 20))
    return msgspec.structs.replace(setup, options=options, kv=found)


def fitted(setup: OrchestratorSetup, room: int | None = None) -> tuple[OrchestratorSetup, str]:
    """The setup with a context and caches that fit, and a note where something was lowered.

    `room`: bytes that the pipeline may take, its caches included, if other pipelines have the rest of the memory.
    Raises InputError, with the arithmetic and the settings that would fit, for what does not fit into the machine.
    """
    options = setup.options
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
    available = _available(needs.budget(settings), memory, asked=options.context == "auto")
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
        setup = _planned(setup, needs, settings, memory, room)
    return setup, " ".join(notes)


def _with_caches(options: Options, share: float) -> Options:
    """With this share of what was asked for as arenas and prefix caches, beside the least of each."""
    asked = {name: getattr(options, name) for name in _CACHES}
    least = {name: min(size, _LEAST_CACHE) for name, size in asked.items()}
    lowered = {name: least[name] + int((size - least[name]) * share) for name, size in asked.items()}
    return msgspec.structs.replace(options, **lowered)


def _available(budget: Budget, memory: int, asked: bool) -> int:
    """Bytes that the pipeline may use. `asked`: the rest depends on the exact number."""
    if not asked and budget.total_bytes <= _CERTAIN_SHARE * memory:
        return usable(memory)
    return usable(memory, gpu_working_set())
