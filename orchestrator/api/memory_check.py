"""What a pipeline is started with so that it fits into this machine's memory, or why it is not started."""

import msgspec

from orchestrator.core.options import Options
from orchestrator.machine.hardware import gpu_working_set, memory_bytes
from orchestrator.machine.memory.budget import Budget, usable
from orchestrator.machine.memory.refusal import LEAST_USEFUL, refusal, size
from orchestrator.runtime.memory_needed import memory_settings, pipeline_needs
from orchestrator.runtime.setup import OrchestratorSetup
from protocol.errors import InputError

CACHES = ("arena_memory", "prefix_cache_memory")
"""The options that bound caches for KV."""
_CERTAIN_SHARE = 0.5
"""Of the memory: so much may be used on every machine, and macOS need not be asked what it recommends."""
_LEAST_CACHE = 16
"""MiB to which arenas and prefix caches are lowered at most."""


def fitted(setup: OrchestratorSetup) -> tuple[OrchestratorSetup, str]:
    """The setup with a context and caches that fit, and a note where something was lowered.

    Raises InputError, with the arithmetic and the settings that would fit, for what does not fit.
    """
    options = setup.options
    try:
        needs = pipeline_needs(setup)
    except InputError:
        # The worker that loads the model says what is wrong with it.
        return setup, ""
    settings = memory_settings(options, needs)
    memory = memory_bytes()
    available = _available(needs.budget(settings), memory, asked=options.context == "auto")
    notes: list[str] = []
    if options.context == "auto":
        context = needs.largest_context(settings, available) or min(LEAST_USEFUL, needs.context)
        settings = msgspec.structs.replace(settings, context=context)
        options = msgspec.structs.replace(options, context=context)
        if context < needs.context:
            notes.append(f"A request may have {context:,} of the target's {needs.context:,} tokens: more don't fit.")
    reason = None if options.memory_check == "off" else refusal(needs, settings, available, memory)
    if reason is not None:
        raise InputError(reason)
    bounded = with_bounded_caches(options, needs.budget(settings), available)
    if bounded != options:
        lowered = sum(needs.budget(memory_settings(bounded, needs)).caches.values())
        notes.append(f"The caches for KV are lowered to {size(lowered)}, which is what the models leave.")
    return msgspec.structs.replace(setup, options=bounded), " ".join(notes)


def with_bounded_caches(options: Options, budget: Budget, available: int) -> Options:
    """Arenas and prefix caches in proportion, so that they take no more than the rest leaves."""
    wanted, left = sum(budget.caches.values()), max(0, available - budget.required_bytes)
    if wanted <= left:
        return options
    lowered = {
        name: min(size, max(_LEAST_CACHE, int(size * left / wanted)))
        for name in CACHES
        for size in (getattr(options, name),)
    }
    return msgspec.structs.replace(options, **lowered)


def _available(budget: Budget, memory: int, asked: bool) -> int:
    """Bytes that the pipeline may use. `asked`: the rest depends on the exact number."""
    if not asked and budget.total_bytes <= _CERTAIN_SHARE * memory:
        return usable(memory)
    return usable(memory, gpu_working_set())
