"""Measures the host's work beside a call of a converted model: `python -m orchestrator.lab.bench.costs.micro_coreml`.

Sizes are those of Qwen2.5-0.5B; logits and weights are random; no device runs. Prints figures as JSON.
"""

import os
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median

import msgspec
import numpy as np

from draft_worker.candidates.noise_prefetch import NoisePrefetch
from draft_worker.candidates.shortlist import GROUP_SIZE, shortlist
from draft_worker.coreml.arrays import Array, Single
from draft_worker.coreml.converted import HostTables
from draft_worker.coreml.package import DecoderShape, Layer, Package
from draft_worker.coreml.rotation import Rotation
from draft_worker.coreml.runtime.call_inputs import CallInputs
from draft_worker.coreml.runtime.forward import PackageForward
from draft_worker.coreml.runtime.memory import HostMemory
from draft_worker.coreml.runtime.tree_slots import PREFIX, TreeSlots
from orchestrator.lab.findings import Value
from protocol.inference.device import compute_on_processor

VOCABULARY = 151_936
_SHAPE = DecoderShape(
    architecture="qwen2",
    layers=(Layer(),) * 24,
    hidden=896,
    heads=14,
    key_heads=2,
    head=64,
    vocabulary=VOCABULARY,
    positions=32_768,
    epsilon=1e-6,
    score_scale=64**-0.5,
)
_ROW_LIMIT = _CALL_LIMIT = 0.2
"""Milliseconds. A predict takes about 7."""
_SPREADS = {"flat": 0.5, "usual": 2.5, "steep": 4.0}
"""Standard deviations of logits; about 2.5 in a language model."""
_ROWS = 8
_SEED = 5


def main() -> int:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-1:])
    compute_on_processor()
    figures = [*choices(), *calls(), *allocations()]
    sys.stdout.write(msgspec.json.encode(figures).decode() + "\n")
    return 0


def choices(repeats: int = 25) -> Iterator[Value]:
    """Eight candidates from a whole vocabulary, a row at a time."""
    prefetch = NoisePrefetch(VOCABULARY, VOCABULARY)
    noises = [prefetch.position(_SEED, position) for position in range(_ROWS)]
    for noise in noises:
        _ = noise.peak_values
    for name, spread in _SPREADS.items():
        rows = _logits(spread)
        for temperature in (0.0, 1.0):
            times = _times(
                [
                    lambda row=row, noise=noise, temperature=temperature: shortlist(
                        row, 8, temperature, noise if temperature else None
                    )
                    for row, noise in zip(rows, noises, strict=True)
                ],
                repeats,
            )
            yield Value(f"choose, {name} logits, T = {temperature:g}", median(times), "ms a row", limit=_ROW_LIMIT)
    row = _logits(1.0)[0]
    halves = row.astype(np.float16)
    widening = _times([lambda: np.copyto(row, halves)], repeats)
    yield Value("widen logits, where a device hands out fp16", median(widening), "ms a row")
    positions = iter(range(_ROWS, 1 << 20))
    drawing = _times([lambda: prefetch.position(_SEED, next(positions)).peak_values], repeats)
    yield Value("draw the noise of a new position, beside a call", median(drawing), "ms")


def calls(repeats: int = 200) -> Iterator[Value]:
    """Embeddings, rotations and mask of a call, for a tree eight deep behind a nearly full context."""
    for context in (512, 2048, 8192):
        package, tables = _package(context), _tables(context)
        for width in package.widths:
            slots, numbers = _tree(context, width)
            inputs = CallInputs(package, tables, width)
            fill = _filling(inputs, slots, numbers)
            yield Value(
                f"inputs of a call, width {width}, {context:,} slots",
                median(_times([fill], repeats)),
                "ms",
                limit=_CALL_LIMIT,
            )


def allocations() -> Iterator[Value]:
    """Peak memory that the host allocates in a call, without the runtime."""
    for context in (512, 2048, 8192):
        yield Value(f"memory allocated in a call, {context:,} slots", peak(context) / 1024, "KiB")


def peak(context: int, width: int = 8) -> int:
    """Peak bytes that the host allocates in a call."""
    package = _package(context)
    forward = PackageForward(package, _tables(context), _ConstantRuntime(package))
    memory = HostMemory(package, np.zeros(package.host_shape, np.float32))
    memory.slots.adopt(context - 2 * width)

    def call() -> None:
        forward.run(memory, memory.slots.add(range(width), [PREFIX] * width))
        memory.slots.keep([], ())

    call()
    tracemalloc.start()
    call()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return most


class _ConstantRuntime:
    """A runtime that returns constant outputs."""

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


def _filling(inputs: CallInputs, slots: TreeSlots, numbers: list[int]) -> Callable[[], None]:
    tokens, positions = ([getattr(slots.row(number), name) for number in numbers] for name in ("token", "position"))

    def fill() -> None:
        data = inputs.place(tokens, positions)
        slots.fill_mask(numbers, data["mask"][0, 0])

    return fill


def _tree(context: int, width: int) -> tuple[TreeSlots, list[int]]:
    """A nearly full context, a path of eight rows, and `width` rows at its end."""
    slots = TreeSlots(context)
    slots.adopt(context - 8 - width - 1)
    first = slots.next_row
    slots.add(range(8), [PREFIX, *range(first, first + 7)])
    return slots, slots.add([11 * index for index in range(width)], [first + 7] * width)


def _logits(spread: float) -> list[Single]:
    """Rows like a language model's logits: a broad bulk and a few tokens far above it."""
    source = np.random.default_rng(_SEED)
    padded = -(-VOCABULARY // GROUP_SIZE) * GROUP_SIZE
    rows = np.full((_ROWS, padded), -np.inf, np.float32)
    rows[:, :VOCABULARY] = source.standard_normal((_ROWS, VOCABULARY), np.float32) * spread
    rows[:, source.integers(0, VOCABULARY, 12)] += 5 * spread
    return list(rows)


def _package(context: int) -> Package:
    return Package(
        source=str(Path()),
        shape=_SHAPE,
        widths=(1, 8, 32),
        context=context,
        weights="fp16",
        outputs=(VOCABULARY,),
        model="",
        tokenizer="",
    )


def _tables(context: int) -> HostTables:
    half = (context, _SHAPE.head // 2)
    embedding = np.random.default_rng(_SEED).random((1024, _SHAPE.hidden), np.float32).astype(np.float16)
    return HostTables(embedding, [Rotation(np.ones(half, np.float32), np.ones(half, np.float32))])


def _times(calls: list[Callable[[], object]], repeats: int) -> list[float]:
    """Milliseconds of each call, in turn. The first turn is a warm-up."""
    times: list[float] = []
    for turn in range(repeats + 1):
        for call in calls:
            began = time.perf_counter()
            call()
            if turn:
                times.append((time.perf_counter() - began) * 1e3)
    return times


if __name__ == "__main__":
    sys.exit(main())
