"""The memory that a pipeline needs, by part, and what of the machine's it may use. Pure."""

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from orchestrator.machine.memory.kv_form import KvSizes, element_bytes
from protocol.contracts.kv_bits import UNQUANTIZED, KvBits
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
_RING = 64 << 20
"""Of one request's feature ring at most (`protocol.features.ring_header`)."""
_FREED = 1 << 30, 256 << 20
"""Freed buffers that MLX may keep on a Mac, in the target and in another worker
(`protocol.inference.device`)."""


def usable(physical: int, working_set: int = 0) -> int:
    """Bytes that a pipeline may use. `working_set`: what macOS recommends for the GPU; 0 elsewhere."""
    return working_set or int(USABLE * physical)


def fits(models: float, available: int) -> bool:
    """Whether models of so many bytes fit beside what else a pipeline needs. `available`: the machine's memory."""
    return models + OVERHEAD <= usable(available)


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
    """One Core ML package."""

    name: str
    """As of a `ModelNeed`."""
    weights: int
    """Each loaded function has a copy."""
    cache: int
    """The KV of a request of any length."""


class MemorySettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the user can choose of a pipeline's memory."""

    context: int
    """Most tokens of a request."""
    requests: int
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
    packages: tuple[PackageNeed, ...] = ()
    rings: bool = False
    """The draft reads the target's hidden states."""
    processes: int = 3

    def budget(self, settings: MemorySettings) -> Budget:
        """What these settings need."""
        parts = {f"the {model.name}'s weights": model.weights for model in self.models}
        for model in self.models:
            requests = settings.requests if model.requests is None else min(model.requests, settings.requests)
            parts[f"the {model.name}'s KV"] = requests * self._kv(model, settings)
            if settings.disk and model.kept:
                parts["a turn that waits for the disk"] = self._kv(model, settings)
        for package in self.packages:
            parts[f"Core ML's copies of the {package.name}"] = package.weights
            parts[f"the KV of the {package.name} in Core ML"] = _caches(package, settings) * package.cache
        parts["buffers of forwards"] = sum(self._buffers(settings))
        parts["feature rings"] = settings.requests * _RING if self.rings else 0
        parts["the processes"] = self.processes * _PROCESS
        caching = sum(model.requests is None for model in self.models)
        caching += sum(package.name == DRAFT for package in self.packages)
        waiting = settings.disk and any(model.kept for model in self.models)
        # More turns wait for the disk while they take no more than arenas may.
        caches = {"arenas": settings.arenas * (1 + waiting), "prefix caches": caching * settings.prefix_cache}
        return Budget({name: size for name, size in parts.items() if size}, caches)

    def without(self, worker: str) -> "PipelineNeeds":
        """The same pipeline without this worker."""
        models = tuple(model for model in self.models if model.name != worker)
        packages = tuple(package for package in self.packages if package.name != worker)
        fewer = (models, packages) != (self.models, self.packages)
        rings = self.rings and worker != DRAFT
        return msgspec.structs.replace(
            self, models=models, packages=packages, rings=rings, processes=self.processes - fewer
        )

    def largest_context(self, settings: MemorySettings, available: int) -> int:
        """The most tokens for which the rest fits into `available` bytes, at most the target's own; 0 if none do."""
        low, high = 0, self.context
        while low < high:
            middle = (low + high + 1) // 2
            tried = msgspec.structs.replace(settings, context=middle)
            low, high = (middle, high) if self.budget(tried).required_bytes <= available else (low, middle - 1)
        return low

    def _kv(self, model: ModelNeed, settings: MemorySettings) -> int:
        """Of one request."""
        if model.kv is None:
            return 0
        element = element_bytes(settings.kv_bits if model.quantizes else UNQUANTIZED, self.on_processor)
        tokens, saved = min(settings.context, model.context), model.quantizes and settings.arenas > 0
        return model.kv.bytes(tokens, element, windows_whole=saved)

    def _buffers(self, settings: MemorySettings) -> Iterator[int]:
        """On a processor a prefill holds the scores of a chunk with the whole context; elsewhere attention is fused,
        and MLX keeps freed buffers."""
        for model in self.models:
            if self.on_processor:
                yield 4 * settings.chunk * min(settings.context, model.context) * model.heads
            else:
                yield _FREED[0] if model.name == TARGET else _FREED[1]


def _caches(package: PackageNeed, settings: MemorySettings) -> int:
    """A draft also has one cache for calls of several requests; a prefill worker holds one prompt."""
    return settings.requests + 1 if package.name == DRAFT else 1
