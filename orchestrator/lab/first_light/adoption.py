"""Measures how long a target takes to adopt KV from shared memory, and compares it with a plain copy.

Imports MLX, so it runs as a process: `python -m orchestrator.lab.first_light.adoption ORDER` writes figures as JSON.
The data is random; the shared memory and the target's code are real.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np

from orchestrator.lab.findings import Value
from orchestrator.lab.first_light.devices import AdoptionOrder
from protocol.child_process import claim_output
from protocol.inference.tree_sequence import TreeSequence
from protocol.kv.arena import Arena
from protocol.kv.arena_header import ArenaLayout, ElementType
from protocol.kv.exchange import KvExchange
from protocol.messages.kv import KvReference

QWEN_3B = ArenaLayout(layers=36, kv_heads=2, capacity=32_768, head_size=128, dtype=ElementType.FLOAT16)
"""The KV of Qwen2.5-3B: 36 KiB a token."""
_COPY_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class AdoptionFigures:
    """Medians, in seconds; `copy_bandwidth` in bytes a second of one big copy, measured in the same run."""

    tokens: int
    bytes: int
    write: float
    """Write rows of a model's KV into a new arena, checksum included."""
    attach: float
    """Open and map the arena, check its header."""
    validate: float
    """Check that every row is as committed."""
    copy: float
    """Copy the rows into a model's KV."""
    copy_bandwidth: float

    @property
    def seconds(self) -> float:
        """From the arena's name to a sequence that can be decoded."""
        return self.attach + self.validate + self.copy

    @property
    def bandwidth_share(self) -> float:
        """Speed of the adoption as a share of a plain copy's speed."""
        return self.bytes / self.seconds / self.copy_bandwidth


def main() -> int:
    order = msgspec.json.decode(sys.argv[-1], type=AdoptionOrder)
    report = claim_output()
    figures = []
    for each in measure(tokens=order.tokens, repeats=order.repeats):
        parts = {"attach": each.attach, "validate": each.validate, "copy": each.copy, "in all": each.seconds}
        name = f"adopt {each.tokens:,} tokens of Qwen2.5-3B's KV"
        figures += [Value(f"{name}, {part}", seconds * 1e3, "ms") for part, seconds in parts.items()]
        figures.append(Value(f"{name}, share of a plain copy's speed", each.bandwidth_share, ""))
    report(figures)
    return 0


def measure(tokens: Sequence[int], repeats: int, layout: ArenaLayout = QWEN_3B) -> list[AdoptionFigures]:
    """One entry for each number of tokens. Needs twice the memory of the largest KV."""
    bandwidth = _copy_bandwidth(repeats)
    return [_measured(layout, count, repeats, bandwidth) for count in tokens]


def _measured(layout: ArenaLayout, tokens: int, repeats: int, bandwidth: float) -> AdoptionFigures:
    exchange = KvExchange(layout, fingerprint="random", epoch=1, owner=os.getpid())
    source = _filled(layout, tokens)
    times = np.median([_once(layout, exchange, source, tokens) for _ in range(repeats)], axis=0)
    write, attach, adopt, copy = times.tolist()
    size = 2 * replace(layout, capacity=tokens).half_bytes
    return AdoptionFigures(tokens, size, write, attach, max(0.0, adopt - attach), copy, bandwidth)


def _once(
    layout: ArenaLayout, exchange: KvExchange, source: TreeSequence, tokens: int
) -> tuple[float, float, float, float]:
    with _arena(exchange, tokens) as arena:
        write = _timed(lambda: _write(arena, source, tokens))
        attach = _timed(lambda: Arena.attach(arena.name).close())
        held: list[Arena] = []
        adopt = _timed(lambda: held.append(exchange.adopt(KvReference(arena.name, tokens))))
        copy = _timed(lambda: _copy(layout, held[0], tokens))
        held[0].close()
    return write, attach, adopt, copy


def _write(arena: Arena, source: TreeSequence, tokens: int) -> None:
    arena.write_rows(0, *source.export(0, tokens))
    arena.commit(tokens)


def _copy(layout: ArenaLayout, arena: Arena, tokens: int) -> None:
    sequence = _empty(layout)
    sequence.adopt(list(arena.keys[:, :, :tokens]), list(arena.values[:, :, :tokens]), tokens, layout.dtype)


def _filled(layout: ArenaLayout, tokens: int) -> TreeSequence:
    random = np.random.default_rng(tokens)
    shape = layout.layers, layout.kv_heads, tokens, layout.head_size
    keys, values = (random.standard_normal(shape, np.float32).astype(layout.dtype.numpy_name) for _ in range(2))
    sequence = _empty(layout)
    sequence.adopt(list(keys), list(values), tokens, layout.dtype)
    return sequence


def _empty(layout: ArenaLayout) -> TreeSequence:
    """Adoption needs only the number of layers of a network."""
    return TreeSequence(SimpleNamespace(layers=[None] * layout.layers))


@contextmanager
def _arena(exchange: KvExchange, tokens: int) -> Iterator[Arena]:
    arena = exchange.create(tokens)
    try:
        yield arena
    finally:
        arena.close()
        arena.unlink()


def _copy_bandwidth(repeats: int) -> float:
    """Bytes a second of one large copy between two arrays."""
    source, target = np.ones(_COPY_BYTES, np.uint8), np.ones(_COPY_BYTES, np.uint8)
    return _COPY_BYTES / statistics.median(_timed(lambda: np.copyto(target, source)) for _ in range(repeats))


def _timed(call: Callable[[], Any]) -> float:
    mx.synchronize()
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
