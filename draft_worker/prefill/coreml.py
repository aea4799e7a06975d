"""The target as a converted model, to read prompts on another device. Knows no messages.

Its KV are the conversion's: what the target samples after adopting them is what it would sample itself
as far as fp16 on that device agrees with the target's own arithmetic.
"""

from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np

from draft_worker.candidates.selector import CandidateSelector
from draft_worker.coreml.arrays import Single
from draft_worker.coreml.converted import Converted
from draft_worker.coreml.runtime.forward import PackageForward
from draft_worker.coreml.runtime.interface import Runtime
from draft_worker.coreml.runtime.memory import HostMemory
from draft_worker.coreml.runtime.runtimes import ExecutorRuntime, default_runtime, open_runtime
from draft_worker.engines.coreml import CoreMlSequence
from protocol.errors import InputError
from protocol.kv.arena import LayerRows
from protocol.kv.arena_header import ArenaLayout, ElementType
from protocol.messages.sampling import Sampling

_ELEMENTS = {mx.float16: ElementType.FLOAT16, mx.bfloat16: ElementType.BFLOAT16, mx.float32: ElementType.FLOAT32}


class CoreMlPrefillEngine:
    """A folder that `launch-pipeline convert` made of the target."""

    name = "coreml"

    def __init__(self, converted: Converted, runtime: Runtime, element: ElementType) -> None:
        """`element`: what the target's own KV are made of."""
        package = converted.package
        _require_plain(converted)
        shape = package.shape
        self.layout = ArenaLayout(shape.layers, shape.key_heads, package.context, shape.head, element)
        self.model = str(converted.folder)
        self.architecture = shape.architecture
        self.vocabulary = shape.vocabulary
        self.context = package.context
        self.device = runtime.device
        self.tokenizer = package.tokenizer
        self._forward = PackageForward(package, converted.tables, runtime)
        self._chooser = CandidateSelector(shape.vocabulary, shape.vocabulary)
        self._cache: Single = np.zeros(package.cache_shape, np.float32)

    @classmethod
    def load(cls, folder: Path, source: Path) -> "CoreMlPrefillEngine":
        """`source`: the target's own folder. Raises InputError if the conversion can't stand in for it."""
        element = kv_element(source)
        # The GPU is the target's; what the host computes beside a call is small.
        mx.set_default_device(mx.cpu)
        converted = Converted.open(folder)
        # Our executor can keep every bit of the fp16 weights' products, so here the KV are the target's own.
        exact = default_runtime() == "executor"
        return cls(converted, ExecutorRuntime(converted, "fp32") if exact else open_runtime(converted), element)

    def open(self) -> "CoreMlPrefillSequence":
        """A new prompt; only the last one opened may be used."""
        memory = HostMemory(self._cache)
        rows = CoreMlSequence(self._forward, memory, Sampling(), self.vocabulary, lambda _: self._chooser)
        return CoreMlPrefillSequence(rows, self._cache, self.layout.dtype)


class CoreMlPrefillSequence:
    """One prompt's KV, in slots [0, committed) of the engine's one cache."""

    def __init__(self, rows: CoreMlSequence, cache: Single, element: ElementType) -> None:
        self._rows = rows
        self._cache = cache
        self._element = element

    def prefill(self, tokens: Sequence[int]) -> tuple[LayerRows, LayerRows]:
        begin = self._rows.committed
        self._rows.prefill(tokens)
        fresh = as_element(self._cache[:, :, begin : begin + len(tokens)], self._element)
        half = len(fresh) // 2
        return list(fresh[:half]), list(fresh[half:])


def kv_element(folder: Path) -> ElementType:
    """What the KV of the model in `folder` are made of when the target runs it on this machine's device."""
    if mx.default_device() == mx.Device(mx.cpu):
        return ElementType.FLOAT32
    for file in sorted(folder.glob("model*.safetensors")):
        tensors = mx.load(str(file))
        assert isinstance(tensors, dict)
        if "model.norm.weight" in tensors:
            return _ELEMENTS[tensors["model.norm.weight"].dtype]
    raise InputError(f"{folder} has no model.norm.weight: only Llama, Qwen2 and Qwen3 models can be converted.")


def as_element(rows: Single, element: ElementType) -> np.ndarray:
    """fp32 rows as an arena holds them; bfloat16 as its bits."""
    if element is ElementType.BFLOAT16:
        return np.array(mx.array(rows).astype(mx.bfloat16).view(mx.uint16))
    return rows.astype(element.numpy_name)


def _require_plain(converted: Converted) -> None:
    package = converted.package
    if package.cache != "io":
        raise InputError(f"{converted.folder} keeps its KV on the device: convert the target with --kv io.")
    if package.interleaved:
        raise InputError(f"{converted.folder} orders a head's features unlike the target: use --prefill-engine none.")
