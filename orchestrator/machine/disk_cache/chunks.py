"""Names of the chunks of a prompt's KV: each names the model and all tokens up to its end. Pure."""

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np

from orchestrator.core.kv.prefill_router import RECALLED_TOKENS
from protocol.kv.arena_header import ArenaLayout

CHUNK = RECALLED_TOKENS
"""Tokens whose KV one file holds."""
_FORMAT = 2


def model_name(model: bytes, layout: ArenaLayout, computed_by: str) -> str:
    """Of all that decides which bytes the KV of given tokens has: 32 hexadecimal digits.

    `model`: the key in arena headers. `computed_by`: version and device, since others round otherwise.
    """
    shape = f"{_FORMAT} {computed_by} {layout.layers} {layout.kv_heads} {layout.head_size} {int(layout.dtype)}"
    return hashlib.sha256(model + shape.encode()).hexdigest()[:32]


def chunk_names(model: str, tokens: Sequence[int]) -> Iterator[str]:
    """Names of the whole chunks of `tokens`, in order. Two prompts share the names of their common chunks alone."""
    chain = model.encode()
    for begin in range(0, len(tokens) - CHUNK + 1, CHUNK):
        chain = hashlib.sha256(chain + np.array(tokens[begin : begin + CHUNK], "<u4").tobytes()).digest()
        yield chain.hex()[:40]
