"""What the host allocates in a call of a converted model does not grow with the context."""

import tracemalloc
from collections.abc import Mapping

import numpy as np

from draft_worker.coreml.converted import HostTables, Rotation
from draft_worker.coreml.package import Array, DecoderShape, Layer, Package
from draft_worker.coreml.runtime.calls import PackageForward
from draft_worker.coreml.runtime.memory import CachePool, HostMemory
from protocol.inference.slots import PREFIX

_WIDTH, _VOCABULARY = 8, 512
_SHAPE = DecoderShape(
    architecture="qwen2",
    layers=(Layer(),) * 2,
    hidden=64,
    heads=4,
    key_heads=2,
    head=16,
    vocabulary=_VOCABULARY,
    positions=32_768,
    epsilon=1e-6,
    score_scale=0.25,
)


class _ConstantRuntime:
    name = device = "none"

    def __init__(self, package: Package) -> None:
        shape, width = package.cache_shape, package.widths[-1]
        self._outputs: dict[str, Array] = {"kv_new": np.zeros((*shape[:2], width, shape[3]), np.float32)}
        for index, rows in enumerate(package.outputs):
            self._outputs[f"logits_{index}"] = np.zeros((1, 1, width, rows), np.float32)

    def load(self, function: str) -> None:
        """There is nothing to load."""

    def predict(self, function: str, inputs: Mapping[str, Array]) -> dict[str, Array]:
        return self._outputs


def peak(context: int) -> int:
    """Peak bytes that the host allocates in a call behind a nearly full context."""
    package = Package(
        source="",
        shape=_SHAPE,
        widths=(1, _WIDTH),
        context=context,
        weights="fp16",
        outputs=(_VOCABULARY,),
        model="",
        tokenizer="",
    )
    half = (context, _SHAPE.head // 2)
    embedding = np.zeros((_VOCABULARY, _SHAPE.hidden), np.float16)
    tables = HostTables(embedding, [Rotation(np.ones(half, np.float32), np.ones(half, np.float32))])
    forward = PackageForward(package, tables, _ConstantRuntime(package))
    memory = HostMemory(CachePool(package))
    memory.slots.adopt(context - 2 * _WIDTH)

    def call() -> None:
        forward.evaluate([memory.rows(memory.slots.add(range(_WIDTH), [PREFIX] * _WIDTH))])
        memory.slots.keep([], ())

    call()
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_no_allocation_of_a_call_grows_with_the_context():
    assert abs(peak(8192) - peak(512)) < 512
