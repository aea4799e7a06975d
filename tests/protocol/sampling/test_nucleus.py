"""Laws of the filters on long rows: the kept tokens of a full sort, without one."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.sample_utils import apply_min_p, apply_top_p

from protocol.messages.sampling import Sampling
from protocol.sampling.top_tokens import log_total
from tests.support.logit_rows import logit_rows, rows, sorted_widths
from tests.support.processing import processed

_MASSES = st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.95, 0.999, 0.999999])
_ROUNDING = 2e-4
"""Most that the order of a float32 sum over a row of these lengths changes it."""
_SHORT_ROUNDING = 1e-6
"""The same of a sum over the most probable tokens alone, from the top down."""


@pytest.fixture(params=["on the host", "on a device"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "on a device":
        monkeypatch.setattr("protocol.sampling.logits_processors.on_host", lambda: False)


def _kept(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    return np.isfinite(np.array(processed(mx.array(logits), sampling)))


def _mass_above(logits: np.ndarray) -> np.ndarray:
    """For each token, the mass of the more probable ones, in float64."""
    logs = np.array(mx.array(logits) - log_total(mx.array(logits)), dtype=np.float64)
    above = np.zeros_like(logs)
    for row, values in enumerate(logs):
        falling = np.sort(values)[::-1]
        before = np.concatenate([[0.0], np.cumsum(np.exp(falling))])
        above[row] = before[np.searchsorted(-falling, -values, side="left")]
    return above


@pytest.mark.usefixtures("place")
@settings(max_examples=150)
@given(logits=logit_rows(), mass=_MASSES)
def test_the_nucleus_is_that_of_a_full_sort(logits: np.ndarray, mass: float):
    kept = _kept(logits, Sampling(temperature=1.0, top_p=mass))

    above = _mass_above(logits)
    different = kept != ((above < mass) & np.isfinite(logits))
    assert np.all(np.abs(above[different] - mass) < _SHORT_ROUNDING)


@settings(max_examples=4)
@given(logits=logit_rows(), mass=_MASSES)
def test_the_nucleus_is_mlx_lm_s_but_for_the_rounding_of_its_sum(logits: np.ndarray, mass: float):
    array = mx.array(logits)
    theirs = np.isfinite(np.array(apply_top_p(array - mx.logsumexp(array, axis=-1, keepdims=True), mass)))

    different = _kept(logits, Sampling(temperature=1.0, top_p=mass)) != theirs
    assert np.all(np.abs(_mass_above(logits)[different] - mass) < _ROUNDING)


@settings(max_examples=4)
@given(logits=logit_rows(), share=st.sampled_from([1e-6, 0.05, 0.5, 1.0]))
def test_min_p_keeps_mlx_lm_s_tokens_and_sorts_nothing(logits: np.ndarray, share: float):
    theirs = np.isfinite(np.array(apply_min_p(mx.array(logits) - log_total(mx.array(logits)), share)))

    with sorted_widths() as widths:
        kept = _kept(logits, Sampling(temperature=1.0, min_p=share))

    assert np.array_equal(kept, theirs)
    assert widths == []


@pytest.mark.usefixtures("place")
@settings(max_examples=60)
@given(logits=logit_rows(), mass=_MASSES, count=st.sampled_from([0, 1, 20, 300]))
def test_a_row_s_nucleus_does_not_depend_on_the_rows_beside_it(logits: np.ndarray, mass: float, count: int):
    sampling = Sampling(temperature=1.0, top_p=mass, top_k=count, min_p=0.001)
    together = _kept(logits, sampling)

    for row in range(len(logits)):
        assert np.array_equal(_kept(logits[row : row + 1], sampling)[0], together[row])


@settings(max_examples=60)
@given(logits=logit_rows(), count=st.sampled_from([1, 2, 50, 400]))
def test_top_k_keeps_what_is_no_less_than_the_kth(logits: np.ndarray, count: int):
    kth = np.sort(logits, axis=-1)[:, -count, None] if count < logits.shape[-1] else -np.inf

    assert np.array_equal(_kept(logits, Sampling(temperature=1.0, top_k=count)), (logits >= kth) & np.isfinite(logits))


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_no_distribution_is_left_alone_and_disturbs_no_other(value: float):
    logits = rows("normal", 2, 5000, seed=1)
    sampling = Sampling(temperature=1.0, top_p=0.9)
    expected = np.array(processed(mx.array(logits[:1]), sampling))
    logits[1] = value

    found = np.array(processed(mx.array(logits), sampling))

    assert np.array_equal(found[:1], expected)
    assert np.array_equal(found[1], logits[1], equal_nan=True)


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0, top_p=0.95),
        Sampling(temperature=1.0, top_k=50, top_p=0.9, min_p=0.01),
        Sampling(temperature=1.0, top_p=0.95, repetition_penalty=1.2),
    ],
)
@pytest.mark.parametrize("kind", ["normal", "equal"])
def test_no_filter_sorts_a_vocabulary_on_the_device(sampling: Sampling, kind: str):
    """Not even for a nucleus of most of the vocabulary."""
    logits = rows(kind, 2, 151_936, seed=3)
    with sorted_widths() as widths:
        _kept(logits, sampling)

    assert max(widths, default=0) < 151_936 / 6
