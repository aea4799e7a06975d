"""What is told of a pipeline that does not fit: the arithmetic, and each setting that would make it fit. Pure."""

from collections.abc import Iterator

import msgspec

from orchestrator.machine.memory.budget import DRAFT, GIB, PREFILL, Budget, MemorySettings, PipelineNeeds

LEAST_USEFUL = 1024
"""Tokens of a context below which it is no remedy."""
_DISPENSABLE = {DRAFT: "a smaller draft, or --draft-engine none", PREFILL: "--prefill-engine none"}
"""What to do without a worker."""
_MIB = 1 << 20


def refusal(needs: PipelineNeeds, settings: MemorySettings, available: int, memory: int) -> str | None:
    """Why the pipeline can't be started, or None. `available`: bytes that it may use of the machine's `memory`."""
    budget = needs.budget(settings)
    if budget.required_bytes <= available:
        return None
    found = list(remedies(needs, settings, available))
    advice = f"What fits: {'; '.join(found)}." if found else "Choose a smaller target."
    return (
        f"This pipeline needs {size(budget.required_bytes)}, and may use {size(available)} of this machine's "
        f"{size(memory)}: {arithmetic(budget, settings)}. {advice} --memory-check off starts it as it is."
    )


def remedies(needs: PipelineNeeds, settings: MemorySettings, available: int) -> Iterator[str]:
    """Settings with which the pipeline fits, each by itself."""

    def fits(changed: MemorySettings, needed: PipelineNeeds = needs) -> bool:
        return needed.budget(changed).required_bytes <= available

    replace = msgspec.structs.replace
    context = needs.largest_context(settings, available)
    # A context that is asked for is that of all concurrent requests.
    alone = "--concurrent 1" if settings.requests == 1 else ""
    if context >= LEAST_USEFUL:
        yield f"--context {_rounded(context)}" + (alone and f" with {alone}")
    fewer = next((count for count in range(settings.requests - 1, 0, -1) if fits(replace(settings, requests=count))), 0)
    if fewer:
        yield f"--concurrent {fewer}"
    quantized = replace(settings, kv_bits=8)
    # A Core ML prefill worker writes rows of 16 bits.
    if settings.kv_bits > quantized.kv_bits and all(package.name != PREFILL for package in needs.packages):
        within = needs.largest_context(quantized, available)
        if fits(quantized):
            yield "--kv-bits 8"
        elif within >= LEAST_USEFUL and within > context:
            yield f"--kv-bits 8 with --context {_rounded(within)}" + (alone and f" and {alone}")
    if settings.disk and fits(replace(settings, disk=False)):
        yield "--disk-cache 0"
    for worker, advice in _DISPENSABLE.items():
        without = needs.without(worker)
        if without != needs and fits(settings, without):
            yield advice


def arithmetic(budget: Budget, settings: MemorySettings) -> str:
    """The parts, the largest first; that of KV with what it is for."""
    what_for = f" ({settings.kv_for})"
    whose: dict[str, str] = {"the target's KV": what_for, "the draft's KV": what_for}
    parts = sorted(budget.parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{name}{whose.get(name, '')} {size(number)}" for name, number in parts)


def size(number: float) -> str:
    """Bytes for people."""
    return f"{number / GIB:.1f} GiB" if number >= 0.1 * GIB else f"{max(1, round(number / _MIB))} MiB"


def _rounded(context: int) -> int:
    """A number that is easily typed."""
    return context // 256 * 256
