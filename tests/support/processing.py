"""Logits processors for tests: those of a request as of some tokens, and what they make of logits."""

from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx

from protocol.messages.base import NodeId, RequestId
from protocol.messages.sampling import Sampling
from protocol.messages.worker import Start
from protocol.sampling.grammar import Grammars
from protocol.sampling.logits_processors import LogitsProcessors


def processors(sampling: Sampling, tokens: Sequence[int] = (0,), prompt: int | None = None) -> LogitsProcessors | None:
    """Of a request without a grammar whose root is the last of `tokens`; all of them are the prompt unless said."""
    start = Start(
        RequestId(1), 0, tuple(tokens), NodeId(1), sampling, prompt_tokens=len(tokens) if prompt is None else prompt
    )
    return LogitsProcessors.wanted(start, Grammars(Path(), 1))


def processed(
    logits: mx.array, sampling: Sampling, tokens: Sequence[int] = (0,), paths: Sequence[Sequence[int]] | None = None
) -> mx.array:
    """(L, V) float32. All rows belong to the root unless `paths` says otherwise."""
    wanted = processors(sampling, tokens)
    paths = [()] * len(logits) if paths is None else paths
    return logits.astype(mx.float32) if wanted is None else wanted.apply(logits, paths)
