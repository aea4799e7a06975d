"""Prefills with a conversion of the target, on another device. Knows no messages.

The KV differ from the target's own KV as far as fp16 on that device differs from the target's arithmetic. So the
tokens sampled after adoption can differ too.
"""

from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np

from draft_worker.coreml.converted import Converted
from draft_worker.coreml.package import Single
from draft_worker.coreml.runtime.calls import PackageForward, Runtime
from draft_worker.coreml.runtime.memory import CachePool, HostMemory
from draft_worker.coreml.runtime.runtimes import ExecutorRuntime, default_runtime, open_runtime
from protocol.contracts.model_folder import ModelFolder
from protocol.errors import InputError
from protocol.inference.device import compute_on_processor
from protocol.kv.arena import LayerRows
from protocol.kv.arena_header import ArenaLayout, ElementType

_ELEMENTS = {"F16": ElementType.FLOAT16, "BF16": ElementType.BFLOAT16, "F32": ElementType.FLOAT32}


class CoreMlPrefillEngine:
    """A conversion of the target by `launch-pipeline convert`."""

    name = "coreml"

    def __init__(self, converted: Converted, runtime: Runtime, element: ElementType) -> None:
        """`element`: the element type of the target's own KV."""
        package = converted.package
        _require_plain(converted)
        shape = package.shape
        self.layout = ArenaLayout(shape.attentions, shape.key_heads, package.context, shape.head, element)
        self.model = str(converted.folder)
        self.architecture = shape.architecture
        self.vocabulary = shape.vocabulary
        self.context = package.context
        self.device = runtime.device
        self.tokenizer = converted.vocabulary_fingerprint()
        self._forward = PackageForward(package, converted.tables, runtime)
        self._pool = CachePool(package)
        self._memory: HostMemory | None = None

    @classmethod
    def load(cls, folder: Path, source: Path) -> "CoreMlPrefillEngine":
        """`source`: the target's own folder. Raises InputError if its KV can't serve the target."""
        element = kv_element(source)
        # The GPU is the target's; the host computes little beside a call.
        compute_on_processor()
        converted = Converted.open(folder)
        # The executor can compute in fp32. Then the KV equal the target's own.
        exact = default_runtime() == "executor"
        return cls(converted, ExecutorRuntime(converted.file, "fp32") if exact else open_runtime(converted), element)

    def open(self) -> "CoreMlPrefillSequence":
        """A sequence for a new prompt. Invalidates the sequence opened before."""
        if self._memory is not None:
            self._memory.close()
        self._memory = HostMemory(self._pool)
        return CoreMlPrefillSequence(self._forward, self._memory, self.layout.dtype)


class CoreMlPrefillSequence:
    """The KV of one prompt, in slots [0, committed) of its cache."""

    def __init__(self, forward: PackageForward, memory: HostMemory, element: ElementType) -> None:
        self._forward = forward
        self._memory = memory
        self._element = element

    def prefill(self, tokens: Sequence[int]) -> tuple[LayerRows, LayerRows]:
        begin = self._memory.slots.committed
        self._forward.prefill(self._memory, tokens)
        fresh = as_element(self._memory.kv[:, :, begin : begin + len(tokens)], self._element)
        half = len(fresh) // 2
        return list(fresh[:half]), list(fresh[half:])


def kv_element(folder: Path) -> ElementType:
    """The element type of the KV when the target runs the model in `folder` on this machine's device."""
    if mx.default_device() == mx.Device(mx.cpu):
        return ElementType.FLOAT32
    norm = ModelFolder(folder).tensors.get("model.norm.weight")
    if norm is None:
        raise InputError(f"{folder} has no model.norm.weight: prefill with --prefill-engine mlx or none.")
    return _ELEMENTS[norm.type]


def as_element(rows: Single, element: ElementType) -> np.ndarray:
    """fp32 rows in an arena's element type; bfloat16 as uint16 bits."""
    if element is ElementType.BFLOAT16:
        return np.array(mx.array(rows).astype(mx.bfloat16).view(mx.uint16))
    return rows.astype(element.numpy_name)


def _require_plain(converted: Converted) -> None:
    package = converted.package
    if package.shape.convolutions:
        raise InputError(f"{converted.folder} has short convolutions, whose state is no KV: use --prefill-engine none.")
    if package.reordered:
        raise InputError(
            f"{converted.folder} orders a head's features differently from the target: use --prefill-engine none."
        )
