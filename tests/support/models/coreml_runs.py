"""Tiny models converted in a test, and a sequence run through a package as an engine will run it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_map, tree_map_with_path

from draft_worker.coreml.conversion.build import write
from draft_worker.coreml.conversion.checkpoint import Checkpoint
from draft_worker.coreml.converted import Converted
from draft_worker.coreml.package import Array
from draft_worker.coreml.runtime.calls import PackageForward
from draft_worker.coreml.runtime.memory import CachePool, HostMemory
from draft_worker.coreml.runtime.runtimes import ExecutorRuntime, Precision
from draft_worker.coreml.toolchain import toolchain
from draft_worker.short_head import HeadTokens
from protocol.contracts.coreml import Choices
from protocol.errors import InputError
from tests.support.models import architectures
from tests.support.models.tiny_models import network

try:
    toolchain()
except InputError as error:
    pytest.skip(str(error), allow_module_level=True)

WIDTHS = (1, 4, 16)
CONTEXT = 96


def tiny(architecture: str = "llama", bits: int | None = None, seed: int = 0, **changes: Any) -> Any:
    """A random model whose norms matter too, with weights that fp16 holds, or quantised ones."""
    model = network(architecture, seed, **changes)
    model.update(tree_map(lambda weights: weights + 0.3 * mx.random.normal(weights.shape), model.parameters()))
    if bits is not None:
        nn.quantize(model, group_size=32, bits=bits)
    model.update(tree_map(half, model.parameters()))
    mx.eval(model.parameters())
    return model


def tiny_of(name: str, layers: int = 2, **changes: Any) -> Any:
    """The same for any of mlx-lm's modules, with sizes of `architecture_sizes`."""
    model = architectures.tiny(name, **{"num_hidden_layers": layers, "max_position_embeddings": 512, **changes})
    model.update(tree_map(lambda weights: weights * 1.5 if weights.ndim == 2 else weights, model.parameters()))
    offset = 1.0 if "gemma" in name else 0.0
    model.update(
        tree_map_with_path(
            lambda path, weights: half(weights + offset) - offset if "norm" in path else half(weights),
            model.parameters(),
        )
    )
    mx.eval(model.parameters())
    return model


def convert(model: Any, folder: Path, head_tokens: HeadTokens | None = None, **choices: Any) -> Converted:
    """The model as a package in `folder`, opened again. `head_tokens`: the tokens of the head if it has only some."""
    write(
        # mlx-lm's Gemma 2 drops this field; a folder's config.json has it.
        Checkpoint(model, head_tokens=head_tokens, config={"max_position_embeddings": 512}),
        folder,
        Choices(**({"widths": WIDTHS, "context": CONTEXT} | choices)),
    )
    return Converted.open(folder)


class Run:
    """One sequence through a package; its rows are never committed."""

    def __init__(self, converted: Converted, precision: Precision = "fp32") -> None:
        runtime = ExecutorRuntime(converted.file, precision)
        self._package = converted.package
        self._forward = PackageForward(self._package, converted.tables, runtime)
        self._memory = HostMemory(CachePool(self._package))

    def evaluate(self, width: int, tokens: Sequence[int], parents: Sequence[int]) -> Array:
        """(tokens, rows of the head) logits of rows that continue `parents`; -1 stands for the empty prefix."""
        numbers = self._memory.slots.add(tokens, parents)
        return self._forward.evaluate([self._memory.rows(numbers)])[:, : self._package.head_rows].copy()

    def chain(self, width: int, tokens: Sequence[int]) -> Array:
        """Logits of tokens that follow one another, `width` at a time."""
        parts = []
        for begin in range(0, len(tokens), width):
            part, last = tokens[begin : begin + width], self._memory.slots.next_row - 1
            parts.append(self.evaluate(width, part, range(last, last + len(part))))
        return np.concatenate(parts)


def half(weights: mx.array) -> mx.array:
    """Rounded to fp16, and fp32 again."""
    return weights.astype(mx.float16).astype(mx.float32) if weights.dtype == mx.float32 else weights
