"""Records a target's states of rows that it wrote. Knows no drafter."""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from draft_worker.training.corpus.rows import Answers
from protocol.errors import InputError
from protocol.inference.tap import LayerTap, proved_tap


def tap_of(model: Any, folder: str) -> LayerTap:
    """Raises InputError for a target whose states can't be recorded."""
    tap = proved_tap(model)
    if tap is None:
        raise InputError(
            f"The states of {folder} can't be recorded, because its layers are no plain stack: choose another target."
        )
    return tap


def recorded(model: Any, tap: LayerTap, outputs: tuple[int, ...], answers: Answers) -> Iterator[np.ndarray]:
    """For each row the (slots, outputs, width) states. `outputs` ascending but for FINAL, which is the last."""
    order = sorted(outputs)
    places = [order.index(output) for output in outputs]
    tap.record(tuple(order))
    try:
        for tokens, starts in zip(answers.tokens, answers.starts, strict=True):
            begins = np.unique(starts)
            ends = [*begins[1:], len(tokens)]
            parts = [states_of(model, tap, tokens[begin:end]) for begin, end in zip(begins, ends, strict=True)]
            yield np.concatenate(parts).reshape(len(tokens), len(order), -1)[:, places]
    finally:
        tap.record(())


def states_of(model: Any, tap: LayerTap, tokens: np.ndarray) -> np.ndarray:
    """(tokens, outputs * width) float32 of one text, in the order of the outputs that the tap records."""
    model(mx.array(tokens)[None], cache=make_prompt_cache(model))
    found = tap.take()
    assert found is not None, "the tap records"
    return found.numbers
