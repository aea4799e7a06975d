"""Measures how long a target takes to adopt KV from shared memory.

Imports MLX, so it runs as a process: `python -m orchestrator.lab.first_light.adoption ORDER` writes figures as JSON.
The data is random; the shared memory and the target's code are real.
"""

import os
import sys
import time
from collections.abc import Callable
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


def main() -> int:
    order = msgspec.json.decode(sys.argv[-1], type=AdoptionOrder)
    report = claim_output()
    report([value for tokens in order.tokens for value in measure(tokens, order.repeats)])
    return 0


def measure(tokens: int, repeats: int, layout: ArenaLayout = QWEN_3B) -> list[Value]:
    """Medians of the parts of an adoption, from the arena's name to a sequence that can be decoded.

    attach: open and map the arena, check its header; validate: check that every row is as committed; copy: the rows
    into a model's KV.
    """
    exchange = KvExchange(layout, fingerprint="random", epoch=1, owner=os.getpid())
    random = np.random.default_rng(tokens)
    shape = layout.layers, layout.kv_heads, tokens, layout.head_size
    keys, values = (random.standard_normal(shape, np.float32).astype(layout.dtype.numpy_name) for _ in range(2))
    source = _adopted(layout, keys, values)
    taken = [_once(layout, exchange, source, tokens) for _ in range(repeats)]
    attach, adopt, copy = np.median(taken, axis=0).tolist()
    parts = {"attach": attach, "validate": max(0.0, adopt - attach), "copy": copy, "in all": max(adopt, attach) + copy}
    name = f"adopt {tokens:,} tokens of Qwen2.5-3B's KV"
    return [Value(f"{name}, {part}", 1e3 * seconds, "ms") for part, seconds in parts.items()]


def _once(layout: ArenaLayout, exchange: KvExchange, source: TreeSequence, tokens: int) -> tuple[float, float, float]:
    arena = exchange.create(tokens)
    try:
        arena.write_rows(0, *source.export(0, tokens))
        arena.commit(tokens)
        attach, attached = _timed(lambda: Arena.attach(arena.name))
        attached.close()
        adopt, held = _timed(lambda: exchange.adopt(KvReference(arena.name, tokens)))
        copy, _ = _timed(lambda: _adopted(layout, held.keys[:, :, :tokens], held.values[:, :, :tokens]))
        held.close()
        return attach, adopt, copy
    finally:
        arena.close()
        arena.unlink()


def _adopted(layout: ArenaLayout, keys: np.ndarray, values: np.ndarray) -> TreeSequence:
    """Adoption needs only the number of layers of a network."""
    sequence = TreeSequence(SimpleNamespace(layers=[None] * layout.layers))
    sequence.adopt(list(keys), list(values), keys.shape[2], layout.dtype)
    return sequence


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Its seconds and its result."""
    mx.synchronize()
    began = time.perf_counter()
    result = call()
    return time.perf_counter() - began, result


if __name__ == "__main__":
    sys.exit(main())
