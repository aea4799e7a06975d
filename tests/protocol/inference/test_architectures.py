"""Every architecture of the installed mlx-lm has a tiny model that runs, whose logits show what a cache lost.

The tests of our own caches stand on this: a token that a cache forgot, or put at a wrong place, changes logits by far
more than rounding does. A new release of mlx-lm fails here by the names of the modules that have no recipe yet.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import CacheList, make_prompt_cache

from tests.support.models.architecture_sizes import VOCABULARY, WINDOW
from tests.support.models.architectures import IMPOSSIBLE, modules, tiny

_PROMPT = np.random.default_rng(seed=5).integers(0, VOCABULARY, 3 * WINDOW)
_RUNNABLE = sorted(set(modules()) - set(IMPOSSIBLE))
_INCONSISTENT = {
    "phi3small": "it adds a mask of True and False to the scores of its block-sparse layers, so they see later tokens",
    "plamo3": "its mask for several tokens lets through one token more than its window, and its cache holds",
}
"""Modules of mlx-lm whose own prefill and decode disagree, with the reason."""


class Run(NamedTuple):
    """Logits (tokens, V) of the prompt, in standard deviations; -inf for ids that a model never gives."""

    prefilled: np.ndarray
    decoded: np.ndarray
    after_another_first_token: np.ndarray
    scale: float


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", _RUNNABLE)
def test_a_module_has_a_tiny_model_that_runs(name: str):
    try:
        _run(name)
    except Exception as error:
        error.add_note(f"mlx_lm/models/{name}.py needs a recipe in tests/support/models/architecture_sizes.py, or a")
        error.add_note("reason in IMPOSSIBLE of tests/support/models/architectures.py if no processor can run it.")
        raise


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", _RUNNABLE)
def test_its_logits_differ_between_tokens_and_depend_on_the_first_of_three_windows(name: str):
    run = _run(name)
    last, other = run.prefilled[-1], run.after_another_first_token[-1]

    assert not np.isnan(run.prefilled).any()
    assert 0.5 < run.scale < 3
    assert _deviation(last, other) > 1e-3


@pytest.mark.sampled(16)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.xfail(reason=_INCONSISTENT[name], raises=AssertionError, strict=True))
        if name in _INCONSISTENT
        else name
        for name in _RUNNABLE
    ],
)
def test_its_logits_of_a_prompt_are_those_of_its_tokens_one_by_one(name: str):
    run = _run(name)

    assert _deviation(run.prefilled, run.decoded) < 1e-3


@pytest.mark.thorough
def test_every_window_is_one_that_three_windows_of_text_leave_behind():
    windows = {(name, window) for name in _RUNNABLE for window in _windows(make_prompt_cache(_model(name)))}

    assert {window for _, window in windows} == {WINDOW}
    assert {name for name, _ in windows} >= {"gemma3", "gemma4", "gpt_oss", "llama4", "baichuan_m1", "recurrent_gemma"}


@pytest.mark.thorough
def test_no_module_makes_a_kind_of_cache_that_nobody_has_looked_at():
    kinds = {type(layer) for name in _RUNNABLE for layer in make_prompt_cache(_model(name))}

    assert {kind.__name__ for kind in kinds} == {
        "KVCache",
        "RotatingKVCache",
        "ChunkedKVCache",
        "ArraysCache",
        "CacheList",
        "LayerCache",
    }


@pytest.mark.skipif(mx.metal.is_available(), reason="only Metal runs them")
@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_an_impossible_module_cannot_run_here(name: str):
    model = tiny(name)

    with pytest.raises(RuntimeError, match="No Metal back-end"):
        mx.eval(model(mx.array([[1, 2, 3]]), cache=make_prompt_cache(model)))


@cache
def _model(name: str) -> Any:
    return tiny(name)


@cache
def _run(name: str) -> Run:
    model = _model(name)
    caches = make_prompt_cache(model)
    decoded = np.concatenate([_logits(model, [token], caches) for token in _PROMPT])
    prefilled = _logits(model, _PROMPT, make_prompt_cache(model))
    changed = _PROMPT.copy()
    changed[0] = (changed[0] + 7) % VOCABULARY
    other = _logits(model, changed, make_prompt_cache(model))
    scale = float(prefilled[np.isfinite(prefilled)].std())
    return Run(prefilled / scale, decoded / scale, other / scale, scale)


def _logits(model: Any, tokens: Any, caches: list[Any]) -> np.ndarray:
    """(tokens, V): of the ids that a prompt here can have."""
    logits = model(mx.array(np.asarray(tokens)[None]), cache=caches)[0, :, :VOCABULARY]
    assert logits.dtype == mx.float32
    return np.array(logits)


def _deviation(logits: np.ndarray, others: np.ndarray) -> float:
    """The mean distance of two arrays, where the first is finite."""
    seen = np.isfinite(logits)
    return float(np.abs(logits[seen] - others[seen]).mean())


def _windows(caches: list[Any]) -> Iterator[int]:
    """The windows and chunks that the caches of a model state."""
    for layer in caches:
        if isinstance(layer, CacheList):
            yield from _windows(list(layer.caches))
        for attribute in ("max_size", "chunk_size", "window_size"):
            if (window := getattr(layer, attribute, None)) is not None:
                yield window
