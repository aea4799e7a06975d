"""The memory that a pipeline needs, by part, and what of the machine's it may use. Pure."""

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from orchestrator.machine.memory.kv_form import LIVE_STATES, KvSizes, element_bytes
from protocol.contracts.model_folder import UNQUANTIZED, KvBits
from protocol.messages.base import MAX_CONTEXT

GIB = 1 << 30
USABLE = 0.75
"""Share of the memory that models may use where macOS recommends none: about what it recommends."""
OVERHEAD = GIB
"""For the KV of some thousand tokens and the processes, of models whose files are not here."""
UNASKED_CONTEXT = 2048
"""Tokens of one request that must fit where no context is asked for."""
TARGET, DRAFT, PREFILL = "target", "draft", "prefill worker"
"""Names of the workers, for users."""
_PROCESS = 256 << 20
"""Of each process without its model: the interpreter, MLX and mlx-lm."""
_TOKENIZER = 16
"""Bytes of memory for each byte of a tokenizer.json; 9 to 18 were measured."""
_TOKENIZERS = 2
"""Processes that load it: the orchestrator, and the program that shows or serves its answers."""
_RING = 64 << 20
"""Of one request's feature ring at most (`protocol.features.ring`)."""
_FREED = 1 << 30, 256 << 20
"""Freed buffers that MLX may keep on a Mac, in the target and in another worker
(`protocol.inference.device`)."""


def usable(physical: int, working_set: int = 0) -> int:
    """Bytes that a pipeline may use. `working_set`: what macOS recommends for the GPU; 0 elsewhere."""
    return working_set or int(USABLE * physical)


def fits(models: float, available: int) -> bool:
    """Whether models of so many bytes fit beside what else a pipeline needs. `available`: bytes that it may use."""
    return models + OVERHEAD <= available


class ModelNeed(NamedTuple):
    """One worker's model."""

    name: str
    """As the user knows it: target, draft or prefill worker."""
    weights: int
    kv: KvSizes | None
    """None if nothing is known of it, or if it has none that grows."""
    heads: int = 0
    """Of attention."""
    quantizes: bool = False
    """It holds KV in the target's bits, and saves it in arenas where there are any."""
    requests: int | None = None
    """Most of them at once; None: as many as the pipeline decodes."""
    context: int = MAX_CONTEXT
    """Most tokens of a request that it sees."""
    kept: bool = False
    """The disk cache keeps its KV of ended requests."""


class PackageNeed(NamedTuple):
    """The Core ML package of a draft."""

    weights: int
    """Each loaded function has a copy."""
    cache: int
    """The KV of a request of any length."""


class MemorySettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the user can choose of a pipeline's memory."""

    context: int = UNASKED_CONTEXT
    """Most tokens of a request."""
    requests: int = 1
    """Decoded at the same time."""
    kv_bits: KvBits = UNQUANTIZED
    arenas: int = 0
    """Bytes."""
    prefix_cache: int = 0
    """Bytes, of each worker."""
    disk: bool = False
    """KV of ended requests is kept on disk."""
    chunk: int = 512
    """Tokens of a prefill's forward."""

    @property
    def kv_for(self) -> str:
        """What KV counts, for users."""
        return f"{self.requests} × {self.context:,} tokens"


class Budget(NamedTuple):
    """Bytes by part. The caches are bounds that can be lowered; all other parts are needed."""

    parts: dict[str, int]
    caches: dict[str, int]

    @property
    def required_bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def cache_bytes(self) -> int:
        return sum(self.caches.values())

    @property
    def total_bytes(self) -> int:
        return self.required_bytes + self.cache_bytes


class PipelineNeeds(msgspec.Struct, frozen=True, kw_only=True):
    """What a pipeline's models take, before anything about it is chosen."""

    models: tuple[ModelNeed, ...]
    context: int
    """The target's own."""
    on_processor: bool
    package: PackageNeed | None = None
    rings: bool = False
    """The draft reads the target's hidden states."""
    processes: int = 3
    tokenizer: int = 0
    """Bytes of the target's tokenizer.json."""

    def budget(self, settings: MemorySettings) -> Budget:
        """What these settings need."""
        parts = {f"the {model.name}'s weights": model.weights for model in self.models}
        for model in self.models:
            requests = settings.requests if model.requests is None else min(model.requests, settings.requests)
            parts[f"the {model.name}'s KV"] = requests * self._kv(model, settings)
            if settings.disk and model.kept:
                parts["a turn that waits for the disk"] = self._kv(model, settings)
        if self.package is not None:
            parts["Core ML's copies of the draft"] = self.package.weights
            # One more cache is for calls of several requests.
            parts["the KV of the draft in Core ML"] = (settings.requests + 1) * self.package.cache
        parts["buffers of forwards"] = sum(self._buffers(settings))
        parts["feature rings"] = settings.requests * _RING if self.rings else 0
        parts["the processes"] = self.processes * _PROCESS
        # A process without MLX has half of its own for a usual one.
        parts["the tokenizer"] = _TOKENIZERS * max(0, _TOKENIZER * self.tokenizer - _PROCESS // 2)
        caching = sum(model.requests is None for model in self.models) + (self.package is not None)
        waiting = settings.disk and any(model.kept for model in self.models)
        # More turns wait for the disk while they take no more than arenas may.
        caches = {"arenas": settings.arenas * (1 + waiting), "prefix caches": caching * settings.prefix_cache}
        return Budget({name: size for name, size in parts.items() if size}, caches)

    def without(self, worker: str) -> "PipelineNeeds":
        """The same pipeline without this worker."""
        models = tuple(model for model in self.models if model.name != worker)
        rings, package = (False, None) if worker == DRAFT else (self.rings, self.package)
        fewer = (models, package) != (self.models, self.package)
        return msgspec.structs.replace(
            self, models=models, package=package, rings=rings, processes=self.processes - fewer
        )

    def largest_context(self, settings: MemorySettings, available: int) -> int:
        """The most tokens for which the rest fits into `available` bytes, at most the target's own; 0 if none do."""
        low, high = 0, self.context
        while low < high:
            middle = (low + high + 1) // 2
            tried = msgspec.structs.replace(settings, context=middle)
            low, high = (middle, high) if self.budget(tried).required_bytes <= available else (low, middle - 1)
        return low

    def conversation(self, name: str, tokens: int, settings: MemorySettings, states: int) -> int:
        """Bytes of the KV of an ended conversation in this worker, with so many recurrent states."""
        asked = msgspec.structs.replace(settings, context=tokens)
        kept = sum(self._kv(model, asked, states) for model in self.models if model.name == name)
        return kept + (self.package.cache if self.package is not None and name == DRAFT else 0)

    def unknown(self, name: str) -> bool:
        """Whether nothing is known of the KV of this worker's model."""
        return any(model.kv is None for model in self.models if model.name == name)

    def folds(self, name: str) -> bool:
        """Whether this worker's model has recurrent states, which no arena holds."""
        return any(model.kv is not None and model.kv.state > 0 for model in self.models if model.name == name)

    def _kv(self, model: ModelNeed, settings: MemorySettings, states: int = LIVE_STATES) -> int:
        """Of one request."""
        if model.kv is None:
            return 0
        element = element_bytes(settings.kv_bits if model.quantizes else UNQUANTIZED, self.on_processor)
        tokens, saved = min(settings.context, model.context), model.quantizes and settings.arenas > 0
        return model.kv.bytes(tokens, element, windows_whole=saved, states=states)

    def _buffers(self, settings: MemorySettings) -> Iterator[int]:
        """On a processor a prefill holds the scores of a chunk with the whole context; elsewhere attention is fused,
        and MLX keeps freed buffers."""
        for model in self.models:
            if self.on_processor:
                yield 4 * settings.chunk * min(settings.context, model.context) * model.heads
            else:
                yield _FREED[0] if model.name == TARGET else _FREED[1]


# What is reported of a pipeline that does not fit -------------------------------------------------

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
    if settings.kv_bits > quantized.kv_bits:
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
